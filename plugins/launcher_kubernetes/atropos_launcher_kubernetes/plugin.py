"""The provider of the launcher `kubernetes`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from atropos_core import hookimpl
from atropos_core.plugins.provider import LauncherProvider, RunContext

if TYPE_CHECKING:
    from atropos_core.launchers import Launcher, PlannedRun, SchedulerFiles
    from atropos_launcher_kubernetes.config import KubernetesOptions


def build(options: KubernetesOptions, context: RunContext) -> Launcher:
    from atropos_launcher_kubernetes.launcher import KubernetesLauncher

    return KubernetesLauncher(options, context.directory)


def render(options: KubernetesOptions, run: PlannedRun) -> SchedulerFiles | None:
    """Return None in the run's own pod, where processes are started at once."""
    import os

    from atropos_launcher_kubernetes.config import SECRETS
    from atropos_launcher_kubernetes.manifests import files

    return None if SECRETS in os.environ else files(options, run)


@hookimpl
def atropos_launchers() -> Iterable[LauncherProvider]:
    yield LauncherProvider(
        "kubernetes",
        "Jobs of a Kubernetes cluster: their manifests, and pods that connect to the run",
        "atropos_launcher_kubernetes.config:KubernetesOptions",
        build,
        several_machines=True,
        render=render,
    )

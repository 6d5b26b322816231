"""The provider of the launcher `ray`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from atropos_core import hookimpl
from atropos_core.plugins.provider import LauncherProvider, RunContext

if TYPE_CHECKING:
    from atropos_core.launchers import Launcher
    from atropos_launcher_ray.config import RayOptions


def build(options: RayOptions, context: RunContext) -> Launcher:
    from atropos_launcher_ray.launcher import RayLauncher

    return RayLauncher(options)


@hookimpl
def atropos_launchers() -> Iterable[LauncherProvider]:
    yield LauncherProvider(
        "ray",
        "processes on the machines of a Ray cluster, each in an actor",
        "atropos_launcher_ray.config:RayOptions",
        build,
        several_machines=True,
        requires=frozenset({"ray"}),
    )

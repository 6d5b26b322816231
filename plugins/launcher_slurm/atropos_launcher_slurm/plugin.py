"""The provider of the launcher `slurm`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from atropos_core import hookimpl
from atropos_core.plugins.provider import LauncherProvider, RunContext

if TYPE_CHECKING:
    from atropos_core.launchers import Launcher, PlannedRun, SchedulerFiles
    from atropos_launcher_slurm.config import SlurmOptions


def build(options: SlurmOptions, context: RunContext) -> Launcher:
    from atropos_launcher_slurm.launcher import SlurmLauncher

    return SlurmLauncher(options, context.directory)


def render(options: SlurmOptions, run: PlannedRun) -> SchedulerFiles | None:
    """Return None inside a job, where processes are started at once."""
    import os

    from atropos_launcher_slurm.batch import files

    return None if "SLURM_JOB_ID" in os.environ else files(options, run)


@hookimpl
def atropos_launchers() -> Iterable[LauncherProvider]:
    yield LauncherProvider(
        "slurm",
        "a job of a Slurm cluster: its batch script, and in it each process by srun",
        "atropos_launcher_slurm.config:SlurmOptions",
        build,
        several_machines=True,
        render=render,
    )

"""Write the files by which a scheduler starts a run, instead of starting its processes."""

from __future__ import annotations

import shlex
import subprocess
from pathlib import Path

from atropos_core import console
from atropos_core.errors import AtroposError, FitError, RunDirectoryError
from atropos_core.launch.model_checks import check_model
from atropos_core.launch.plan import Plan
from atropos_core.launchers import SchedulerFiles
from atropos_core.plugins.provider import LauncherProvider
from atropos_core.storage.atomic import WRITABLE, write_whole
from atropos_core.storage.file_permissions import make_private, private_files
from atropos_core.storage.run_directory import RunDirectory

SUBMIT_DEADLINE_S = 120.0


def render(plan: Plan, directory: Path) -> SchedulerFiles | None:
    """Return the scheduler's files, or None if the launcher starts processes here and now. Raises AtroposError for a run that
    could not work there."""
    launcher = plan.single["launcher"]
    provider = launcher.offer.provider
    assert isinstance(provider, LauncherProvider)
    made = provider.render(launcher.options, plan.for_launcher(directory))
    if made is not None:
        plan.check_files()
        check_model(plan, directory)
    return made


def hand_over(made: SchedulerFiles, run: RunDirectory) -> None:
    """Write the files into the run directory, and submit them or print how to. Raises RunDirectoryError, and FitError if the
    scheduler refuses them."""
    directory = run.path
    try:
        run.refuse_used()
        with private_files():
            for path, text in made.files.items():
                make_private((directory / path).parent)
                write_whole(directory / path, text)
    except OSError as error:
        raise RunDirectoryError(f"{directory} cannot be written: {error.strerror}.", remedy=WRITABLE) from error
    for path in made.files:
        console.say(f"written: {directory / path}")
    if made.submits:
        console.say(_submitted(made))
    else:
        console.say(f"nothing was started. To start it: {shlex.join(made.submit)}")


def say_files(made: SchedulerFiles) -> None:
    """Print the files without writing them."""
    for path, text in made.files.items():
        console.say(f"--- {path}\n{text}")
    console.say(f"nothing was written; once the files are there: {shlex.join(made.submit)}")


def _submitted(made: SchedulerFiles) -> str:
    try:
        done = subprocess.run(made.submit, capture_output=True, text=True, timeout=SUBMIT_DEADLINE_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise _refused(made, str(error)) from error
    if done.returncode:
        raise _refused(made, (done.stderr or done.stdout).strip())
    return done.stdout.strip()


def _refused(made: SchedulerFiles, said: str) -> AtroposError:
    return FitError(
        f"{shlex.join(made.submit)} did not start the run: {said}", remedy="The files are written: submit them by hand."
    )

"""`atropos resume`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from atropos_core.cli.completion import runs
from atropos_core.cli.options import SetOption, StepsOption

if TYPE_CHECKING:
    from atropos_core.launch.plan import Plan


def add(app: typer.Typer) -> None:
    app.command("resume", rich_help_panel="Train")(resume)


def resume(
    directory: Annotated[
        Path,
        typer.Argument(
            help="The directory of a run that was stopped or died.", show_default=False, autocompletion=runs
        ),
    ],
    steps: StepsOption = None,
    changes: SetOption = None,
) -> None:
    """Continue a run from its last complete checkpoint.

    [bold]Examples[/]

      atropos resume runs/gsm8k-20260131-120000

      atropos resume runs/gsm8k-20260131-120000 --steps 400
    """
    from atropos_core import console
    from atropos_core.cli.run import execute_and_report

    resumed = plan_resume(directory, steps=steps, changes=changes)
    if resumed.has_steps:
        execute_and_report(resumed.plan, directory, resume=True)  # which itself reports broken checkpoints
    else:
        console.say(f"To train on: atropos resume {console.quoted(directory)} --steps {2 * resumed.step}")


@dataclass(frozen=True)
class ResumedRun:
    """The rest of a run."""

    plan: Plan
    step: int  # of its last whole checkpoint
    has_steps: bool  # False if all of its steps are done


def plan_resume(directory: Path, *, steps: int | None = None, changes: Sequence[str] | None = None) -> ResumedRun:
    """Plan the rest of a run, after printing what has changed since its checkpoint. Raises AtroposError."""
    from atropos_core import console
    from atropos_core.cli.options import configure
    from atropos_core.config.run_file import flatten
    from atropos_core.errors import CheckpointError
    from atropos_core.launch.plan import make_plan
    from atropos_core.storage.checkpoint import taking_up
    from atropos_core.storage.run_directory import RunDirectory

    run = RunDirectory(directory)
    run.require_run()
    before, model, plugins = configure(saved=directory)
    loaded, resolved, _ = configure(saved=directory, steps=steps, changes=changes)
    plan = make_plan(loaded.config, resolved, plugins)
    broken: list[str] = []
    try:
        checkpoint = run.checkpoints.latest(broken.append)
    except CheckpointError:
        for warning in broken:
            console.warn(warning)
        raise
    known = checkpoint.state.get("settings") if checkpoint is not None else None
    with taking_up("what the checkpoint says of settings"):
        changed = list(differences(known or dict(flatten(make_plan(before.config, model, plugins).resolved())), plan))
    for change in changed:
        console.say(f"changed: {change}")
    refuse_fixed(known or {}, plan, directory)
    if checkpoint is not None and checkpoint.step >= loaded.config.all_steps:
        for warning in broken:
            console.warn(warning)
        console.say(f"nothing left to do: {directory} has all of its {checkpoint.step} steps.")
        return ResumedRun(plan, checkpoint.step, False)
    if checkpoint is None:
        console.say("there is no checkpoint yet: starting from the first step")
    return ResumedRun(plan, 0 if checkpoint is None else checkpoint.step, True)


def refuse_fixed(saved: Mapping[str, Any], plan: Plan, directory: Path) -> None:
    """Raises CheckpointError if an option has another value than the `saved` one, and the trainer's checkpoint fits only that."""
    from atropos_core import console
    from atropos_core.config.run_file import flatten, toml_value
    from atropos_core.errors import CheckpointError
    from atropos_core.plugins.model_provider import TrainerProvider

    trainer = plan.single.get("trainer")
    if trainer is None or not isinstance(trainer.offer.provider, TrainerProvider):
        return
    now = dict(flatten(plan.resolved()))
    for path in (f"{trainer.label}.{name}" for name in trainer.offer.provider.fixed):
        if path in saved and path in now and saved[path] != now[path]:
            raise CheckpointError(
                f"{path} is {now[path]!r}, and the checkpoint in {directory} was saved with {saved[path]!r}.",
                remedy="Resume without this change. To train with it, start a new run: atropos run "
                f"{console.quoted(directory / 'config.toml')} --set {console.quoted(f'{path}={toml_value(now[path])}')}",
            )


def differences(before: Mapping[str, Any], plan: Plan) -> Iterator[str]:
    """Yield what differs from when the checkpoint was saved: by a flag, a changed file or another version."""
    from atropos_core.config.run_file import flatten

    now = dict(flatten(plan.resolved()))
    if any(
        path.endswith(".code") for path in before
    ):  # a checkpoint's settings contain digests of code, a run file does not
        now |= plan.code()
    for path in [*now, *(path for path in before if path not in now)]:
        if now.get(path) != before.get(path):
            if path.endswith(".code") and path in now and path in before:
                yield f"the code behind {path.removesuffix('.code')} ({now[path.removesuffix('.code')]})"
                continue
            is_, had = (repr(values[path]) if path in values else "not set" for values in (now, before))
            yield f"{path} is {is_}; the run had {had}"

"""`atropos resume`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from atropos_core.cli.options import SetOption, StepsOption


def add(app: typer.Typer) -> None:
    app.command("resume")(resume)


def resume(
    directory: Annotated[
        Path, typer.Argument(help="The directory of a run that was stopped or died.", show_default=False)
    ],
    steps: StepsOption = None,
    changes: SetOption = None,
) -> None:
    """Go on with a run from its last whole checkpoint.

    [bold]Examples[/]

      atropos resume runs/gsm8k-20260131-120000

      atropos resume runs/gsm8k-20260131-120000 --steps 400
    """
    from atropos_core import console
    from atropos_core.assemble import make_plan
    from atropos_core.checkpoint import Checkpoints
    from atropos_core.cli.options import configure
    from atropos_core.cli.run import close, offer_resume, say_resume
    from atropos_core.errors import Interrupted, RunDirectoryError
    from atropos_core.run import execute

    if not (directory / "config.toml").is_file():
        raise RunDirectoryError(
            f"{directory} is not a run directory: it has no config.toml.", remedy="`ls -t runs` shows the newest."
        )
    before, _, _ = configure(directory / "config.toml")
    loaded, resolved, plugins = configure(directory / "config.toml", steps=steps, changes=changes)
    old = {path: value for path, value, _ in before.rows()}
    for path, value, _ in loaded.rows():
        if old.get(path) != value:
            console.say(f"changed: {path} is {value!r}; the run had {old.get(path, 'nothing')!r}")
    checkpoint = Checkpoints(directory / "checkpoints").latest(console.warn)
    if checkpoint is not None and checkpoint.step >= loaded.config.training.steps:
        console.say(f"nothing left to do: {directory} has all of its {checkpoint.step} steps.")
        console.say(f"To train on: atropos resume {directory} --steps {2 * checkpoint.step}")
        return
    if checkpoint is None:
        console.say("there is no checkpoint yet: starting from the first step")
    try:
        summary = execute(make_plan(loaded.config, resolved, plugins), directory, resume=True)
    except Interrupted as error:
        say_resume(directory, error)
        raise typer.Exit(error.exit_code) from None
    except BaseException:
        offer_resume(directory)
        raise
    close(summary)

"""`atropos plot`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def add(app: typer.Typer) -> None:
    app.command("plot", rich_help_panel="Look")(plot)


def plot(
    run: Annotated[Path, typer.Argument(help="A run directory; the run may still be running.", show_default=False)],
    out: Annotated[
        Path | None, typer.Option("--out", help="The PNG's file. \\[default: plot.png in the run directory]")
    ] = None,
) -> None:
    """Draw a run's rewards, held-out evaluations and health findings as a PNG, and in the terminal if it shows pictures (kitty,
    iTerm2, WezTerm, ghostty). Runs of half a minute or more are also drawn when they end.

    [bold]Examples[/]

      atropos plot runs/gsm8k-20260131-120000

      atropos plot runs/gsm8k-20260131-120000 --out rewards.png
    """
    from atropos_core import console
    from atropos_core.launch.picture import draw, show

    path = draw(run, out)
    show(path)
    console.say(str(path))

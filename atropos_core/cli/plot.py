"""`atropos plot`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def add(app: typer.Typer) -> None:
    app.command("plot", rich_help_panel="Look")(plot)


def plot(
    runs: Annotated[
        list[Path],
        typer.Argument(
            help="A run directory, or several; a run may still be running.", show_default=False, metavar="RUN..."
        ),
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", help="The PNG's file; needed for several runs. \\[default: plot.png in the run directory]"
        ),
    ] = None,
) -> None:
    """Draw a run's rewards, held-out evaluations and health findings as a PNG, and in the terminal if it shows pictures (kitty,
    iTerm2, WezTerm, ghostty). Runs of half a minute or more are also drawn when they end. Several runs are drawn in one picture,
    a line each, without findings.

    [bold]Examples[/]

      atropos plot runs/gsm8k-20260131-120000

      atropos plot runs/gsm8k-20260131-120000 --out rewards.png

      atropos plot runs/rate-1e-5 runs/rate-1e-4 --out rates.png
    """
    from atropos_core import console
    from atropos_core.launch.picture import draw, draw_several, show

    path = draw(runs[0], out) if len(runs) == 1 else draw_several(runs, out)
    show(path)
    console.say(str(path))

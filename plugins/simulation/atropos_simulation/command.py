"""`atropos simulate`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from atropos_simulation.figures import Known
    from atropos_simulation.loop_model import ClusterSize


def add(app: typer.Typer) -> None:
    app.command("simulate", rich_help_panel="Look")(simulate)


def simulate(
    run: Annotated[
        Path | None,
        typer.Argument(
            metavar="RUN", help="Directory of a run that has ended: its records give the figures.", show_default=False
        ),
    ] = None,
    figures: Annotated[Path | None, typer.Option(help="TOML file of figures, over those of RUN.")] = None,
    changes: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="SECTION.FIGURE=VALUE", help="A figure, over both. Several are fine."),
    ] = None,
    engines: Annotated[
        str, typer.Option(help="How many engines, with commas: one line of the table each.")
    ] = "1,8,64,512",
    workers: Annotated[str, typer.Option(help="Worker processes: one number for all lines, or one for each.")] = "1",
    batch_grows: Annotated[
        bool,
        typer.Option(
            "--batch-grows", help="run.groups_per_step is for one engine, so twice the engines have twice the batch."
        ),
    ] = False,
    seed: Annotated[int, typer.Option(help="Seed of the lengths that are drawn.")] = 0,
) -> None:
    """Simulate a run with more engines, from the figures of a finished run: its tokens/s, and what saturates first.

    [bold]Examples[/]

      atropos simulate runs/gsm8k-20260131-120000 --set hub.group_s=0.001 --set worker.rollout_s=0

      atropos simulate --figures cluster.toml --engines 8,64,512 --workers 1,8,64 --batch-grows
    """
    from atropos_core import console
    from atropos_simulation import report
    from atropos_simulation.figures import from_settings

    fleets = _fleets(engines, workers)
    known = from_settings(changes or ()).over(known_from(run, figures))
    given = known.figures()
    console.table(("figure", "value", "from"), report.figure_rows(known))
    console.say()
    made = list(report.rows(given, fleets, grows=batch_grows, seed=seed))
    console.table(report.COLUMNS, [row.cells for row in made])
    for line in report.conclusions(given, made):
        console.say(line)


def known_from(run: Path | None, file: Path | None) -> Known:
    """Return the figures from a run's records and from a file; the file takes precedence. Raises ConfigError, RunDirectoryError."""
    from atropos_core.errors import ConfigError
    from atropos_simulation.figures import Known, from_file
    from atropos_simulation.measured import from_run

    if run is None and file is None:
        raise ConfigError(
            "a simulation needs figures, but neither a run nor --figures is given.",
            remedy="Name the directory of a run that has ended, or a TOML file: --figures FILE.",
        )
    known = Known({}, {}, {})
    if run is not None:
        known = from_run(run)
    return from_file(file).over(known) if file is not None else known


def _fleets(engines: str, workers: str) -> Sequence[ClusterSize]:
    from atropos_core.errors import ConfigError
    from atropos_simulation.loop_model import ClusterSize

    def numbers(flag: str, text: str) -> list[int]:
        try:
            found = [int(one) for one in text.split(",")]
        except ValueError:
            found = []
        if not found or min(found) < 1:
            raise ConfigError(
                f"{flag} {text}: not a list of numbers of 1 or more, separated by commas.",
                remedy=f"For example: {flag} 1,8,64",
            )
        return found

    many, each = numbers("--engines", engines), numbers("--workers", workers)
    if len(each) not in (1, len(many)):
        raise ConfigError(
            f"--workers {workers} has {len(each)} numbers, and --engines {len(many)}.",
            remedy="Give one for all, or one for each.",
        )
    return [ClusterSize(*pair) for pair in zip(many, each * (len(many) if len(each) == 1 else 1), strict=True)]

"""`atropos view`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from atropos_core.cli.completion import runs as run_directories

HTML_MB = 20.0


def add(app: typer.Typer) -> None:
    app.command("view", rich_help_panel="Look")(view)


def view(
    runs: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="RUN",
            help="Run directories, running or ended; several are shown side by side. Without any: the newest in runs/.",
            show_default=False,
            autocompletion=run_directories,
        ),
    ] = None,
    port: Annotated[
        int,
        typer.Option(min=0, max=65535, help="Port of the page, which only this machine can open. 0: any free port."),
    ] = 0,
    html: Annotated[
        Path | None, typer.Option(help="Write one file that opens anywhere without a server, then exit.")
    ] = None,
    html_mb: Annotated[
        float, typer.Option(min=0.5, help="Largest size of that file; rollouts of older steps are left out first.")
    ] = HTML_MB,
    force: Annotated[bool, typer.Option("--force", help="Overwrite the file of --html if it exists.")] = False,
) -> None:
    """Look at runs in a browser: curves with the health findings on them, rollouts token by token, evaluations before and
    after, where the time went. A run that is still going is followed.

    [bold]Examples[/]

      atropos view runs/gsm8k-20260131-120000

      atropos view runs/a runs/b --html comparison.html
    """
    from atropos_core import console
    from atropos_core.errors import ConfigError, RunDirectoryError
    from atropos_viewer.page_records import PageRecords, newest_run

    if html is not None and port:
        raise ConfigError("--port has no effect with --html: a file needs no server.", remedy="Leave one of them out.")
    if html is None and html_mb != HTML_MB:
        raise ConfigError("--html-mb has no effect without --html.", remedy="Add --html FILE, or leave it out.")
    if html is None and force:
        raise ConfigError("--force has no effect without --html.", remedy="Add --html FILE, or leave it out.")
    if html is not None and html.exists() and not force:
        raise RunDirectoryError(f"{html} exists already.", remedy="Name another file, or add --force to write over it.")
    if not runs:
        runs = [newest_run(Path("runs"))]
        console.say(f"the newest run: {runs[0]}")
    records = PageRecords(runs)
    if html is not None:
        from atropos_viewer.single_file import write

        left_out = write(records, html, int(html_mb * 1e6))
        console.say(f"{html}: {html.stat().st_size / 1e6:.1f} MB")
        for text in left_out:
            console.say(f"left out: {text}")
        return
    from atropos_viewer.server import serve

    serve(records, port)

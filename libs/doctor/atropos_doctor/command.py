"""`atropos doctor`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from atropos_core.cli.completion import runs

if TYPE_CHECKING:
    from atropos_core.interfaces import Finding


def add(app: typer.Typer) -> None:
    app.command("doctor", rich_help_panel="Look")(doctor)


def doctor(
    run: Annotated[
        Path | None,
        typer.Argument(
            help="The directory of a running or finished run. Without it: check this machine.",
            show_default=False,
            autocompletion=runs,
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document, and nothing else.")] = False,
) -> None:
    """Check this machine (Python, plugins, torch, memory, disk, ports, the hub), or a run: what is wrong with it, and since
    when. Ends with 1 if something is wrong.

    [bold]Examples[/]

      atropos doctor

      atropos doctor runs/gsm8k-20260131-120000
    """
    from atropos_core import console

    findings = findings_of(run)
    broken = [finding for finding in findings if finding.ok is False]
    if as_json:
        console.findings_document(findings)
        raise typer.Exit(int(bool(broken)))
    console.findings(findings)
    if broken:
        console.say(f"{len(broken)} of {len(findings)} are broken; each comes with what to do.")
        raise typer.Exit(1)
    console.say("nothing is broken.")


def findings_of(run: Path | None) -> list[Finding]:
    """Return the findings of a run, or of this machine. Raises RunDirectoryError if there is no run."""
    if run is None:
        from atropos_doctor.machine_checks import examine

        return examine()
    from atropos_doctor.diagnose import diagnose

    return diagnose(run)

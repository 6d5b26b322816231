"""`atropos doctor`."""

from __future__ import annotations

import typer


def add(app: typer.Typer) -> None:
    app.command("doctor")(doctor)


def doctor() -> None:
    """Look at this machine: Python, plugins, torch, memory, disk, ports, the hub. Ends with 1 where something is broken.

    [bold]Example[/]

      atropos doctor
    """
    from atropos_core import console
    from atropos_core.doctor import examine

    findings = examine()
    console.findings(findings)
    broken = [finding for finding in findings if finding.ok is False]
    if broken:
        console.say(f"{len(broken)} of {len(findings)} are broken; each comes with what to do.")
        raise typer.Exit(1)
    console.say("nothing is broken.")

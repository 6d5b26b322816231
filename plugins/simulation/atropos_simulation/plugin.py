"""Offers the command `atropos simulate`, and its lines in a dry run of a run that spans machines."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from atropos_core import hookimpl


@hookimpl
def atropos_commands(app: Any) -> None:  # a typer.Typer: to list plugins, nothing of the sort is imported
    from atropos_simulation import command

    command.add(app)


@hookimpl
def atropos_dry_run(plan: Any, figures: Path | None) -> Iterable[str]:
    from atropos_simulation import planned

    return planned.lines(plan, figures)

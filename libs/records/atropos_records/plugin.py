"""Offers the commands `atropos export` and `atropos audit`, and `atropos_core.export`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from atropos_core import hookimpl


@hookimpl
def atropos_commands(app: Any) -> None:  # a typer.Typer: to list plugins, nothing of the sort is imported
    from atropos_records import audit_command, export_command

    export_command.add(app)
    audit_command.add(app)


@hookimpl
def atropos_functions() -> Mapping[str, Callable[..., Any]]:
    from atropos_records.export_command import pushed

    return {"export": pushed}

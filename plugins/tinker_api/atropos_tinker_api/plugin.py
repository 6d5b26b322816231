"""Offers the command `atropos tinker`."""

from __future__ import annotations

from typing import Any

from atropos_core import hookimpl


@hookimpl
def atropos_commands(app: Any) -> None:  # a typer.Typer: to list plugins, nothing of the sort is imported
    from atropos_tinker_api import command

    command.add(app)

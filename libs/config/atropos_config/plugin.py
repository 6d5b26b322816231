"""Offers the commands `atropos config show` and `atropos config schema`."""

from __future__ import annotations

from typing import Any

from atropos_core import hookimpl


@hookimpl
def atropos_commands(app: Any) -> None:  # a typer.Typer: to list plugins, nothing of the sort is imported
    from atropos_config import command

    command.add(app)

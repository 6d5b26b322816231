"""The plugin: adds the command `atropos adapter`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from atropos_core import hookimpl

if TYPE_CHECKING:
    import typer


@hookimpl
def atropos_commands(app: typer.Typer) -> None:
    from atropos_adapter_kit import command

    command.add(app)

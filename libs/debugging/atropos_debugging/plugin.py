"""Offers the commands `atropos rescore`, `atropos bisect` and `atropos replay`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from atropos_core import hookimpl

if TYPE_CHECKING:
    import typer


@hookimpl
def atropos_commands(app: typer.Typer) -> None:
    from atropos_debugging import bisect_command, replay_command, rescore_command

    rescore_command.add(app)
    bisect_command.add(app)
    replay_command.add(app)

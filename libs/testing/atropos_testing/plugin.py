"""The plugin: adds the commands `atropos check` and `atropos new`, and `atropos_core.check`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from atropos_core import hookimpl

if TYPE_CHECKING:
    import typer


@hookimpl
def atropos_commands(app: typer.Typer) -> None:
    from atropos_testing import check_command, new_command

    new_command.add(app)
    check_command.add(app)


@hookimpl
def atropos_functions() -> Mapping[str, Callable[..., Any]]:
    from atropos_testing.check_command import check_component

    return {"check": check_component}

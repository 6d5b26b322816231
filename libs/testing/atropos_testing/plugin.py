"""The plugin: adds the commands `atropos check` and `atropos new`, and `atropos_core.check`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from atropos_core import hookimpl

if TYPE_CHECKING:
    import typer

    from atropos_core.interfaces import CheckComponent


@hookimpl
def atropos_commands(app: typer.Typer) -> None:
    from atropos_testing import check_command, new_command

    new_command.add(app)
    check_command.add(app)


@hookimpl
def atropos_component_checks() -> Iterable[CheckComponent]:
    from atropos_testing.check_command import check_component

    yield check_component

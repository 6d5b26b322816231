"""What help texts say is shown: square brackets in them are text, and no markup that nobody sees."""

from __future__ import annotations

from collections.abc import Iterator

import click
import pytest
import typer
from rich.text import Text

from atropos_core.cli import make_app


def commands(command: click.Command, name: str) -> Iterator[tuple[str, click.Command]]:
    yield name, command
    for each, below in getattr(command, "commands", {}).items():
        yield from commands(below, f"{name} {each}")


@pytest.mark.parametrize(
    "command",
    [pytest.param(each, id=name) for name, each in commands(typer.main.get_command(make_app()), "atropos")],
)
def test_every_default_that_a_help_text_names_is_shown(command: click.Command) -> None:
    for parameter in command.params:
        message = getattr(parameter, "help", None) or ""
        assert Text.from_markup(message).plain == message.replace("\\[", "["), f"{parameter.name}: {message}"

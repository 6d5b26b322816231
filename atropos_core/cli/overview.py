"""`atropos --help`: every command with its first sentence.

typer would draw it with rich's Markdown and a parser for it, which take longer to import than everything else that is needed here.
"""

from __future__ import annotations

from typing import Any

import typer
from typer.core import TyperGroup

from atropos_core import console

EXAMPLES = (
    ("atropos run --bridge ipc --env gsm8k", "train the tiny policy that comes along; it learns in a minute or two"),
    ("atropos plugins", "what is installed"),
    ("atropos run --help", "what a command takes, with examples"),
)


class Overview(TyperGroup):
    """The group of all commands."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        console.say(f"Usage: {ctx.command_path} [OPTIONS] COMMAND [ARGS]...\n\n{self.help}")
        commands = [(name, self.get_command(ctx, name)) for name in self.list_commands(ctx)]
        console.overview(
            "Commands", [(name, _first_sentence(one.help)) for name, one in commands if one and not one.hidden]
        )
        options = [
            option.get_help_record(ctx) for option in self.get_params(ctx) if isinstance(option, typer.core.TyperOption)
        ]
        console.overview("Options", [(record[0].split()[0], record[1]) for record in options if record])
        console.overview("Examples", EXAMPLES)


def _first_sentence(text: str | None) -> str:
    paragraph = " ".join((text or "").split("\n\n")[0].split())
    return paragraph.partition(". ")[0].removesuffix(".")

"""`atropos --help`: commands to begin with, then every command with its first sentence, in groups.

A command says its group when it is added: `app.command("view", rich_help_panel="Look")`.

typer would use rich's Markdown and its parser, which take longer to import than everything else here together.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import typer
from typer.core import TyperGroup
from typer.main import get_command_name, solve_typer_info_defaults

from atropos_core.console import say
from atropos_core.console.terminal import is_plain, put, put_line, rich_console

UsageError: Any = typer.BadParameter.__base__  # click's; some versions of typer have their own copy
OPTIONS = (("--version", "Say which version this is."), ("--help, -h", "Show this message and exit."))
GROUPS = ("Train", "Look", "Build", "Connect")
OTHERS = "Other"  # commands that name no group of these
FIRST = (
    (
        "run",
        "atropos run --bridge ipc --env gsm8k",
        "train the tiny policy that comes with Atropos; it learns in a minute or two",
    ),
    ("view", "atropos view", "look at the newest run in a browser"),
    ("new", "atropos new environment my_tasks", "write a small environment that works, and change it"),
    ("plan", "atropos plan --model tiny", "see which context and batch fit on this device"),
)


class Overview(TyperGroup):
    """The group of all commands, with its own help page."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except UsageError as error:
            unknown: Any = error  # perhaps a NoSuchOption
            if hasattr(error, "possibilities") and hasattr(error, "option_name"):
                if flag := _flag_for(error):
                    unknown.message += f". Write {flag}"
                    unknown.possibilities = None
                elif key := _key_of(error):
                    unknown.message += f". Keys of a run file are set with --set: --set {key}=VALUE"
                    unknown.possibilities = None
            raise

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        try:
            return super().resolve_command(ctx, args)
        except UsageError as error:
            from atropos_core.plugins.manager import BROUGHT_BY

            if args and (distribution := BROUGHT_BY.get(args[0])):
                raise UsageError(
                    f"'{args[0]}' is a command of {distribution}, which is not installed or does not load. "
                    f"Install it with: pip install {distribution}. `atropos plugins` shows what is broken.",
                    ctx=error.ctx,
                ) from None
            raise

    def format_help(self, ctx: Any, formatter: Any) -> None:
        commands = [(name, self.get_command(ctx, name)) for name in self.list_commands(ctx)]
        show(
            self.help,
            [
                (name, one.help, getattr(one, "rich_help_panel", None))
                for name, one in commands
                if one and not one.hidden
            ],
        )


def _flag_for(error: Any) -> str | None:
    """Return what to write here for another library's flag, if the command takes it."""
    from atropos_core.config.error_text import FLAGS

    written = FLAGS.get(error.option_name.lstrip("-").replace("-", "_"), "")
    return (
        written if any(option in written.split() for one in error.ctx.command.params for option in one.opts) else None
    )


def _key_of(error: Any) -> str | None:
    """Return the run-file key behind a flag that the command lacks: the same name, or another library's name for it."""
    if not any("--set" in one.opts for one in error.ctx.command.params):
        return None
    from atropos_core.config.error_text import ALIASES
    from atropos_core.config.run_file import RunConfig

    name = error.option_name.lstrip("-").replace("-", "_")
    sections = {key: field.annotation for key, field in RunConfig.model_fields.items()}
    found = [f"{key}.{name}" for key, section in sections.items() if name in getattr(section, "model_fields", ())]
    return ALIASES.get(name) or (found[0] if len(found) == 1 else None)


def show_alone(app: typer.Typer) -> None:
    """Show the help page without making a parser for each command: a fifth of the time."""
    commands = [
        (name_of(one), one.help or inspect.getdoc(one.callback), one.rich_help_panel)
        for one in app.registered_commands
        if one.callback and not one.hidden
    ]
    groups = [
        (one.name or "", one.help, one.rich_help_panel)
        for one in map(solve_typer_info_defaults, app.registered_groups)
        if not one.hidden
    ]
    show(app.info.help, [*commands, *groups])


def name_of(command: Any) -> str:
    """Return the command's name as it is typed."""
    return str(command.name or get_command_name(command.callback.__name__))


def show(what: str | None, commands: Sequence[tuple[str, str | None, object]]) -> None:
    """Print the help: `commands` are their name, help text and `rich_help_panel`."""
    say(f"Usage: atropos [OPTIONS] COMMAND [ARGS]...\n\n{what} Every command has --help, with examples.")
    names = {name for name, _, _ in commands}
    _section("Start here", [(typed, text) for name, typed, text in FIRST if name in names])
    for group in (*GROUPS, OTHERS):
        if rows := [
            (name, _first_sentence(text))
            for name, text, panel in commands
            if (panel if panel in GROUPS else OTHERS) == group
        ]:
            _section(group, rows)
    _section("Options", OPTIONS)


def _section(title: str, rows: Sequence[tuple[str, str]]) -> None:
    """Print names and descriptions under a title. On a terminal a long text continues below its own beginning."""
    if is_plain(title, *(text for row in rows for text in row)):
        longest = max((len(name) for name, _ in rows), default=0)
        for line in ("", title, *(f"  {name:<{longest}}  {text}" for name, text in rows)):
            put_line(line)
        return
    from rich.table import Table
    from rich.text import Text

    console = rich_console()
    put(console, f"\n{title}", markup=False, style="bold")
    grid = Table.grid(padding=(0, 0, 0, 2), pad_edge=True)
    grid.add_column(style="cyan", no_wrap=True)
    grid.add_column()
    for row in rows:
        grid.add_row(*map(Text, row))
    put(console, grid, soft_wrap=False)


def _first_sentence(text: str | None) -> str:
    paragraph = " ".join((text or "").split("\n\n")[0].split())
    return paragraph.partition(". ")[0].removesuffix(".")

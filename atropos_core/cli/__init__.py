"""The command line: one short module per command. Nothing heavy is imported before a command needs it."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Annotated

import typer

from atropos_core.cli.completion import VARIABLE as COMPLETES
from atropos_core.cli.guarded import GUARDED, STARTED, guarded
from atropos_core.cli.overview import OPTIONS, Overview, name_of, show_alone

OWN = {  # command -> its module here
    "run": "run", "resume": "resume", "plugins": "plugins", "plot": "plot", "completion": "completion",
}  # fmt: skip


def main() -> None:
    """The entry point `atropos`."""
    arguments = sys.argv[1:]
    if arguments and arguments[0] in GUARDED:
        code = guarded(arguments[0], lambda: run_app(arguments))
    else:
        code = run_app(arguments)
    gc.freeze()  # otherwise the interpreter searches all modules for cycles as it exits: 50 ms of `atropos plugins`
    sys.exit(code)


def run_app(arguments: list[str]) -> int:
    """Return the exit code of `atropos ARGUMENTS`. Print our own errors in a few lines, and others with a traceback."""
    from atropos_core.errors import AtroposError

    if COMPLETES in os.environ:
        from typer.completion import completion_init  # type: ignore[attr-defined] # typer.completion has it, and does not export it

        completion_init()
    try:
        if code := _ended(arguments):
            return code
        if not set(arguments[:1]) & set(STARTED) and "atropos_core.console" in sys.modules:
            from atropos_core.console.terminal import refuse_lost_output

            refuse_lost_output()
    except AtroposError as error:
        from atropos_core import console

        console.fail(error)
        return error.exit_code
    except (OSError, MemoryError) as raised:
        from atropos_core import console
        from atropos_core.guards.system_errors import named_error

        if (found := named_error(raised)) is None:
            raise
        console.fail(found)
        return found.exit_code
    return 0


def _ended(arguments: list[str]) -> int:
    app = make_app(arguments)
    try:
        if arguments in (["--help"], ["-h"]):
            show_alone(app)
        else:
            app(args=arguments, prog_name="atropos")
    except SystemExit as ended:
        return ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    return 0


def make_app(arguments: Sequence[str] = ()) -> typer.Typer:
    """Return the command line. If `arguments` begin with one of our own commands, add only that one; otherwise add all, with
    those of plugins."""
    app = typer.Typer(
        cls=Overview,
        help="Reinforcement learning for language models, on a laptop or a cluster.",
        no_args_is_help=True,
        add_completion=False,
        rich_markup_mode="rich",
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["--help", "-h"]},
    )
    app.callback()(_atropos)
    own = arguments[0] if arguments and arguments[0] in OWN else None
    for module in OWN.values() if own is None else [OWN[own]]:
        import_module(f"atropos_core.cli.{module}").add(app)
    if own is None:
        _add_from_plugins(app)
        _leave_one(app, arguments[:1])
    return app


def _leave_one(app: typer.Typer, name: Sequence[str]) -> None:
    """If a plugin has a command of this name, keep only that one: typer takes 2 ms to make each parser."""
    commands = [one for one in app.registered_commands if name_of(one) in name]
    groups = [one for one in app.registered_groups if one.name in name]
    if commands or groups:
        app.registered_commands[:], app.registered_groups[:] = commands, groups


def _say_version(wanted: bool) -> None:
    if wanted:
        from atropos_core import __version__, console

        console.say(f"atropos {__version__}")
        raise typer.Exit


def _atropos(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_say_version, help=dict(OPTIONS)["--version"])
    ] = False,
) -> None: ...


def _add_from_plugins(app: typer.Typer) -> None:
    """Add the commands of each plugin. If one plugin raises, leave out only its commands and say so."""
    from atropos_core import console
    from atropos_core.plugins.manager import load_plugins

    for implementation in load_plugins().manager.hook.atropos_commands.get_hookimpls():
        try:
            implementation.function(app)
        except Exception as error:  # noqa: BLE001 - the plugin boundary: a plugin's code may raise anything
            console.warn(f"the commands of {implementation.plugin_name} are left out: {type(error).__name__}: {error}")

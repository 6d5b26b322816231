"""The command line: one short module per command. Nothing heavy is imported before a command needs it."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import typer

from atropos_core.cli.guarded import GUARDED, guarded

OWN = ("run", "resume", "eval", "process", "plugins", "new", "check", "config", "doctor", "adapter")


def main() -> None:
    """The entry point `atropos`."""
    arguments = sys.argv[1:]
    if arguments and arguments[0] in GUARDED:
        sys.exit(guarded(arguments[0], lambda: run_app(arguments)))
    sys.exit(run_app(arguments))


def run_app(arguments: list[str]) -> int:
    """The exit code of `atropos ARGUMENTS`. Errors that we raise are printed in a few lines, others with a traceback."""
    from atropos_core.errors import AtroposError

    try:
        make_app(arguments)(args=arguments, prog_name="atropos")
    except SystemExit as ended:
        return ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except AtroposError as error:
        from atropos_core import console

        console.fail(error)
        return error.exit_code
    except (OSError, MemoryError) as raised:
        from atropos_core import console
        from atropos_core.cli.exhausted import named

        if (found := named(raised)) is None:
            raise
        console.fail(found)
        return found.exit_code
    return 0


def make_app(arguments: Sequence[str] = ()) -> typer.Typer:
    """The command line. Plugins' commands are in it unless `arguments` begin with one of our own."""
    from atropos_core.cli import adapter, check, config, doctor, evaluate, new, plugins, process, resume, run

    app = typer.Typer(
        help="Reinforcement learning of language models, from a laptop up.",
        no_args_is_help=True,
        add_completion=False,
        rich_markup_mode="rich",
        pretty_exceptions_enable=False,
    )
    for command in (run, resume, evaluate, process, plugins, new, check, config, doctor, adapter):
        command.add(app)
    if not arguments or arguments[0] not in OWN:
        _add_from_plugins(app)
    return app


def _add_from_plugins(app: typer.Typer) -> None:
    """Commands of plugins, each plugin by itself: one that raises loses its commands and is named."""
    from atropos_core import console
    from atropos_core.plugins import load_plugins

    for implementation in load_plugins().manager.hook.atropos_commands.get_hookimpls():
        try:
            implementation.function(app)
        except Exception as error:  # noqa: BLE001 - the plugin boundary: whatever a stranger's code raises is theirs
            console.warn(f"the commands of {implementation.plugin_name} are left out: {type(error).__name__}: {error}")

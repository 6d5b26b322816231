"""The command line: one short module per command. Nothing heavy is imported before a command needs it."""

from __future__ import annotations

import sys

import typer


def main() -> None:
    """The entry point `atropos`."""
    sys.exit(run_app(sys.argv[1:]))


def run_app(arguments: list[str]) -> int:
    """The exit code of `atropos ARGUMENTS`. Errors that we raise are printed in a few lines, others with a traceback."""
    from atropos_core.errors import AtroposError

    try:
        make_app()(args=arguments, prog_name="atropos")
    except SystemExit as ended:
        return ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except AtroposError as error:
        from atropos_core import console

        console.fail(error)
        return error.exit_code
    return 0


def make_app() -> typer.Typer:
    """The whole command line, plugins' commands included."""
    from atropos_core.cli import check, config, doctor, evaluate, new, plugins, resume, run

    app = typer.Typer(
        help="Reinforcement learning of language models, from a laptop up.",
        no_args_is_help=True,
        add_completion=False,
        rich_markup_mode="rich",
        pretty_exceptions_enable=False,
    )
    for command in (run, resume, evaluate, plugins, new, check, config, doctor):
        command.add(app)
    return app

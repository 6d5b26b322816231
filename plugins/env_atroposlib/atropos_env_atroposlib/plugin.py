"""Register `--env atroposlib:path/to/file.py`, and the command `atropos import`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from atropos_core import hookimpl
from atropos_core.plugins.provider import Provider, RunContext

if TYPE_CHECKING:
    from atropos_core.interfaces import Environment
    from atropos_env_atroposlib.options import AtroposlibOptions


def build(options: AtroposlibOptions, context: RunContext) -> Environment:
    from atropos_env_atroposlib.environment import AtroposlibEnvironment

    return AtroposlibEnvironment(options, context)


@hookimpl
def atropos_environments() -> Iterable[Provider[Environment]]:
    yield Provider(
        "atroposlib",
        "an environment file written for atroposlib, unmodified, in a separate process",
        "atropos_env_atroposlib.options:AtroposlibOptions",
        build,
        requires=frozenset({"transformers"}),
        argument="file",
    )


@hookimpl
def atropos_commands(app: Any) -> None:  # a typer.Typer, which listing plugins does not import
    from atropos_env_atroposlib.importing import command

    command.add(app)

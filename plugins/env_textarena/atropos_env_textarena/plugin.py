"""Register the environment `textarena`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from atropos_core import hookimpl
from atropos_core.plugins.provider import Provider, RunContext

if TYPE_CHECKING:
    from atropos_core.interfaces import Environment
    from atropos_env_textarena.config import TextarenaOptions


def build(options: TextarenaOptions, context: RunContext) -> Environment:
    from atropos_env_textarena.environment import Textarena

    return Textarena(options)


@hookimpl
def atropos_environments() -> Iterable[Provider[Environment]]:
    yield Provider(
        "textarena",
        "any game of textarena, the policy against itself: textarena:TicTacToe-v0",
        "atropos_env_textarena.config:TextarenaOptions",
        build,
        requires=frozenset({"textarena"}),
        argument="game",
    )

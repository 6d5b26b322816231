"""Register the environment `gem`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from atropos_core import hookimpl
from atropos_core.plugins.provider import Provider, RunContext

if TYPE_CHECKING:
    from atropos_core.interfaces import Environment
    from atropos_env_gem.config import GemOptions


def build(options: GemOptions, context: RunContext) -> Environment:
    from atropos_env_gem.environment import Gem

    return Gem(options)


@hookimpl
def atropos_environments() -> Iterable[Provider[Environment]]:
    yield Provider(
        "gem",
        "any environment of gem, by id: gem:game:GuessTheNumber-v0-easy",
        "atropos_env_gem.config:GemOptions",
        build,
        requires=frozenset({"gem-llm"}),
        argument="id",
    )

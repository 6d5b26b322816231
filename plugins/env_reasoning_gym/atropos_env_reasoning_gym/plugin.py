"""Register the environment `reasoning_gym`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from atropos_core import hookimpl
from atropos_core.plugins.provider import Provider, RunContext

if TYPE_CHECKING:
    from atropos_core.interfaces import Environment
    from atropos_env_reasoning_gym.config import ReasoningGymOptions


def build(options: ReasoningGymOptions, context: RunContext) -> Environment:
    from atropos_env_reasoning_gym.environment import ReasoningGym

    return ReasoningGym(options)


@hookimpl
def atropos_environments() -> Iterable[Provider[Environment]]:
    yield Provider(
        "reasoning_gym",
        "reasoning-gym's task generators, and mixtures of them: reasoning_gym:chain_sum",
        "atropos_env_reasoning_gym.config:ReasoningGymOptions",
        build,
        requires=frozenset({"reasoning_gym"}),
        argument="dataset",
    )

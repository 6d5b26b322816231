"""Register the environment `verifiers`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from atropos_core import hookimpl
from atropos_core.plugins.provider import Provider, RunContext

if TYPE_CHECKING:
    from atropos_core.interfaces import Environment
    from atropos_env_verifiers.config import VerifiersOptions


def build(options: VerifiersOptions, context: RunContext) -> Environment:
    from atropos_env_verifiers.environment import VerifiersEnvironment

    return VerifiersEnvironment(options, context)


@hookimpl
def atropos_environments() -> Iterable[Provider[Environment]]:
    yield Provider(
        "verifiers",
        "an environment written for verifiers, by id: verifiers:owner/name",
        "atropos_env_verifiers.config:VerifiersOptions",
        build,
        requires=frozenset({"verifiers"}),
        argument="id",
    )

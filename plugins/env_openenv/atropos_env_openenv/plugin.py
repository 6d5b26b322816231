"""Register the environment `openenv`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from atropos_core import hookimpl
from atropos_core.plugins.provider import Provider, RunContext

if TYPE_CHECKING:
    from atropos_core.interfaces import Environment
    from atropos_env_openenv.config import OpenenvOptions


def build(options: OpenenvOptions, context: RunContext) -> Environment:
    from atropos_env_openenv.environment import OpenEnv

    return OpenEnv(options, context)


@hookimpl
def atropos_environments() -> Iterable[Provider[Environment]]:
    yield Provider(
        "openenv",
        "an environment behind a server of OpenEnv: openenv:http://127.0.0.1:8000",
        "atropos_env_openenv.config:OpenenvOptions",
        build,
        argument="url",
    )

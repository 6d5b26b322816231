"""Offers the commands of the trajectory API, and the server by which workers reach a run's engines."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from atropos_core import hookimpl

if TYPE_CHECKING:
    from pathlib import Path

    from atropos_core.interfaces import Engine, EngineServer, ModelInfo, ServeEngine


@hookimpl
def atropos_commands(app: Any) -> None:  # a typer.Typer: to list plugins, nothing of the sort is imported
    from atropos_trajectory_api.roles import commands, process_command
    from atropos_trajectory_api.server import serve_command

    for command in (serve_command, commands, process_command):
        command.add(app)


@hookimpl
def atropos_engine_servers() -> Iterable[ServeEngine]:
    return [_serve_engine]


async def _serve_engine(
    engine: Engine, where: str, token_file: Path | None, info: ModelInfo | None = None
) -> EngineServer:
    from atropos_trajectory_api.engine_http.server import open_engine_server

    return await open_engine_server(engine, where, token_file, info)

"""Offers the commands of the trajectory API, the source of groups and the engine server of a run with an [api], and the engine `remote`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from atropos_core import hookimpl
from atropos_core.plugins.model_provider import EngineProvider
from atropos_core.plugins.provider import RunContext

if TYPE_CHECKING:
    from pathlib import Path

    from atropos_core.interfaces import Engine, ModelInfo, Transport
    from atropos_core.plugins.services import EngineServer, OpenSource, ServeEngine
    from atropos_trajectory_api.engine_http.config import RemoteEngineOptions


@hookimpl
def atropos_commands(app: Any) -> None:  # a typer.Typer: to list plugins, nothing of the sort is imported
    from atropos_trajectory_api.roles import commands, process_command, serve_command

    for command in (serve_command, commands, process_command):
        command.add(app)


@hookimpl
def atropos_functions() -> Mapping[str, Callable[..., Any]]:
    from atropos_trajectory_api.roles.process_command import process

    return {"process": process}


@hookimpl
def atropos_engine_servers() -> Iterable[ServeEngine]:
    return [_serve_engine]


async def _serve_engine(
    engine: Engine, where: str, token_file: Path | None, info: ModelInfo | None = None
) -> EngineServer:
    from atropos_trajectory_api.engine_http.server import open_engine_server

    return await open_engine_server(engine, where, token_file, info)


@hookimpl
def atropos_sources() -> Iterable[OpenSource]:
    return [_source]


def _source(*given: Any, **named: Any) -> Any:
    from atropos_trajectory_client.source import ApiSource

    return ApiSource(*given, **named)


@hookimpl
def atropos_engines() -> Iterable[EngineProvider]:
    yield EngineProvider(
        "remote",
        "an engine elsewhere: `atropos engine`",
        "atropos_trajectory_api.engine_http.config:RemoteEngineOptions",
        _remote,
        transports=_by_files,
        idle=_elsewhere,
        announces=lambda options: {"engine/unknown": True},  # its precision, which a trainer may correct for
    )


def _by_files(options: object) -> frozenset[Transport]:
    return frozenset({"checkpoint", "adapter"})


def _elsewhere(options: object, devices: object) -> Mapping[str, str]:
    return dict.fromkeys(("devices", "threads"), "whose engine runs elsewhere: tell that `atropos engine`")


def _remote(options: RemoteEngineOptions, context: RunContext) -> Engine:
    from atropos_core.config.run_file import read_token
    from atropos_trajectory_client.remote_engine import RemoteEngine

    token = read_token(options.token_file) if options.token_file else None
    return RemoteEngine(options.url, token, context.transport, context.patience)

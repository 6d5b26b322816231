"""One server: its directory, its processes, its socket, and its end."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from atropos_core import console
from atropos_core.config.run_file import RunConfig
from atropos_core.errors import ConfigError, Interrupted
from atropos_core.interfaces import ModelInfo
from atropos_core.launch.signals import cancelled_by_signals, watched
from atropos_core.models.model_size import context_tokens
from atropos_core.plugins.manager import Plugins
from atropos_core.plugins.provider import ResolvedModel
from atropos_core.rollouts.tokenizer import ChatTokenizer
from atropos_core.storage.file_permissions import private_files
from atropos_http_server.answers import Refusals
from atropos_http_server.body_limits import JSON_COST
from atropos_http_server.body_limits import Limits as BodyLimits
from atropos_http_server.connection_limits import Gate
from atropos_http_server.loopback import require_token
from atropos_http_server.server import ListenOptions, RunningServer, check_port, serve_in_loop
from atropos_http_server.tokens import read_server_token
from atropos_tinker_api.backends import Backends, backends
from atropos_tinker_api.http.app import TinkerApp, refuse
from atropos_tinker_api.service import Service
from atropos_tinker_api.state.checkpoints import Checkpoints
from atropos_tinker_api.state.directory import ServerDirectory
from atropos_tinker_api.state.models import Models
from atropos_tinker_api.state.samplers import Samplers
from atropos_tinker_api.state.sessions import Sessions
from atropos_tinker_api.work.operations import Limits
from atropos_tinker_api.work.sampling import SamplingWork
from atropos_tinker_api.work.saving import Saving
from atropos_tinker_api.work.tidying import tidy
from atropos_tinker_api.work.training import Training

KEY = b"tml-"  # how a key begins that the official client accepts
GRACE_S = 2  # for answers in progress at the end
KEEP_ALIVE_S = 600  # a connection between two calls
LISTEN = ListenOptions("--host", "--port")
REFUSALS = Refusals(
    refuse,
    request_s="`atropos tinker --request-s`",
    connections="`atropos tinker --connections`",
    body="`atropos tinker --body-mb`",
)


@dataclass(frozen=True)
class ServeOptions:
    """The options of the command."""

    names: tuple[str, ...]
    directory: Path
    host: str
    port: int
    token_file: Path | None
    adapters: int
    body_bytes: int
    queue_bytes: int
    request_s: float
    connections: int
    snapshots: int
    snapshot_hours: float


def serve(options: ServeOptions, config: RunConfig, model: ResolvedModel, plugins: Plugins) -> None:
    """Serve until SIGTERM or Ctrl-C. Raises AtroposError."""
    key = key_of(options)
    with private_files(), ExitStack() as stack:
        directory = ServerDirectory(options.directory.absolute(), model.directory)
        stack.callback(directory.close)
        asyncio.run(_stopped_by_signals(_serve(options, config, model, plugins, directory, key)))
    console.say(f"ended; clients continue when it is started again with --dir {options.directory}.")


def key_of(options: ServeOptions) -> bytes | None:
    """Return what callers must send. Raises ConfigError."""
    require_token(
        options.host,
        given=options.token_file is not None,
        what="the server needs a key",
        remedy=f"Add --token-file FILE, which only you can read, with a secret word that begins with {KEY.decode()}, or leave --host out.",
    )
    if options.token_file is None:
        return None
    key = read_server_token(options.token_file)
    if not key.startswith(KEY):
        raise ConfigError(
            f"the word in {options.token_file} does not begin with {KEY.decode()}, and tinker's client sends no other keys.",
            remedy=f"Put {KEY.decode()} in front of it.",
        )
    return key


async def _stopped_by_signals(work: Coroutine[Any, Any, None]) -> None:
    """End quietly at the first request to end."""
    try:
        with cancelled_by_signals():
            await work
    except asyncio.CancelledError:
        pass
    except Interrupted:
        pass


async def _serve(
    options: ServeOptions,
    config: RunConfig,
    model: ResolvedModel,
    plugins: Plugins,
    directory: ServerDirectory,
    key: bytes | None,
) -> None:
    check_port(_host(options), options.port, LISTEN)
    async with backends(config, model, plugins, directory.path, options.adapters) as parts:
        tokenizer = await asyncio.to_thread(ChatTokenizer, model.directory)
        service = _service(options, model.directory, directory, parts, parts.info, tokenizer)
        app = TinkerApp(service, key)
        running = await _listen(options, app, key)
        try:
            _say(options, running, service)
            for one in service.models.all():
                service.training.wake(one)
            await watched(_work(service, options.snapshot_hours * 3600), parts.children)
        finally:
            await running.close()
            await service.sampling.close()
            service.models.close()


async def _work(service: Service, silent_s: float) -> None:
    """Raises what ends the server."""
    tidying = tidy(service.sessions, service.samplers, service.checkpoints, silent_s)
    await asyncio.gather(service.training.run(), tidying)


def _service(
    options: ServeOptions,
    model: Path,
    directory: ServerDirectory,
    parts: Backends,
    info: ModelInfo,
    tokenizer: ChatTokenizer,
) -> Service:
    limits = Limits(info.vocabulary, context_tokens(model))
    checkpoints = Checkpoints(directory.models)
    samplers = Samplers(directory.samplers, checkpoints, options.snapshots)
    return Service(
        model=model,
        names=tuple(dict.fromkeys((*options.names, str(model)))),
        architecture=info.architecture,
        limits=limits,
        sessions=Sessions(directory.sessions),
        models=Models(directory.models, options.queue_bytes),
        checkpoints=checkpoints,
        samplers=samplers,
        training=Training(parts.trainer, Saving(checkpoints, samplers), limits, options.adapters),
        sampling=SamplingWork(parts.engine, samplers, tokenizer, limits, options.adapters),
    )


async def _listen(options: ServeOptions, app: TinkerApp, key: bytes | None) -> RunningServer:
    limits = BodyLimits(
        app,
        body_bytes=options.body_bytes,
        in_flight_bytes=max(8 * options.body_bytes, 64_000_000),
        request_s=options.request_s,
        hold_s=options.request_s,
        cost=lambda scope: 2 if scope["path"].endswith("/forward_backward") else JSON_COST,
        refusals=REFUSALS,
    )

    def stop() -> None:
        limits.stop()
        app.stop()

    gate = Gate(options.request_s, options.connections, check_users=key is None, refusals=REFUSALS)
    return await serve_in_loop(
        limits,
        gate,
        _host(options),
        options.port,
        stop=stop,
        grace_s=GRACE_S,
        keep_alive_s=KEEP_ALIVE_S,
        options=LISTEN,
    )


def _host(options: ServeOptions) -> str:
    return options.host.strip("[]")


def _say(options: ServeOptions, running: RunningServer, service: Service) -> None:
    key = "the word in the file of --token-file" if options.token_file else "any, as tml-local"
    console.facts(
        [
            ("model", ", ".join(service.names)),
            ("directory", f"{options.directory}: {len(service.models.all())} adapters"),
            ("TINKER_BASE_URL", running.url),
            ("TINKER_API_KEY", key),
        ]
    )

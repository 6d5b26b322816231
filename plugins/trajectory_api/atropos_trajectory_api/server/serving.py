"""One server process: its socket, its event loop, and an end that loses nothing."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import json
import signal
import socket
import ssl
import sys
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

from starlette.types import ASGIApp

from atropos_core import console
from atropos_core.errors import ConfigError, RunDirectoryError
from atropos_core.storage.file_permissions import make_private, private_files
from atropos_http_server.connection_limits import Gate
from atropos_http_server.loopback import require_token
from atropos_http_server.server import HttpServer
from atropos_http_server.tls import tls_context
from atropos_http_server.tokens import read_server_token
from atropos_trajectory_api.http.answers import REFUSALS
from atropos_trajectory_api.options import ServeOptions
from atropos_trajectory_api.server.app import App
from atropos_trajectory_api.service.service import Service

DRAIN_S = 10.0
SWITCH_S = 0.0001  # the longest that the loop waits for a thread reading a large body, each time a socket is ready; 0.005 otherwise
KEEP_ALIVE_S = 75  # longer than clients keep an idle connection, so that a client that sends never finds it closed
RUNNING = (
    "running"  # a file in the directory while a server uses it; if it is found at the start, that server was killed
)


class Server(HttpServer):
    """uvicorn's server, but it ends with 0 on the first signal and does not delay the end."""

    def __init__(self, app: ASGIApp, gate: Gate, stop: Callable[[], None], tls: ssl.SSLContext | None) -> None:
        super().__init__(app, gate, lifespan=True, stop=stop, grace_s=int(DRAIN_S), keep_alive_s=KEEP_ALIVE_S, tls=tls)

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.handle_exit, number, None)
        try:
            yield
        finally:
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.remove_signal_handler(number)


def serve(options: ServeOptions) -> None:
    """Serve until SIGTERM or Ctrl-C."""
    token = read_server_token(options.token_file) if options.token_file else None
    require_token(
        options.host,
        given=token is not None,
        remedy="Add --token-file FILE (README of the plugin: how to make one), or leave --host out.",
    )
    if (options.tls_cert is None) != (options.tls_key is None):
        raise ConfigError("TLS needs both --tls-cert and --tls-key.")
    tls = tls_context(options.tls_cert, options.tls_key) if options.tls_cert and options.tls_key else None
    vocabulary = ids_of(options.model) if options.model else 0
    listening = bind(options.host, options.port)
    try:
        sys.setswitchinterval(SWITCH_S)
        with private_files():
            asyncio.Runner(loop_factory=_loop_factory()).run(_serve(options, listening, token, vocabulary, tls))
    finally:
        listening.close()


def _close_to_others(directory: Path) -> None:
    """Hide the directory from other users, since groups hold prompts and replies. Raises RunDirectoryError."""
    try:
        make_private(directory)
    except OSError as error:
        raise RunDirectoryError(
            f"the server's directory {directory} cannot be used: {error.strerror}.", remedy="Choose another with --dir."
        ) from error


def ids_of(model: Path) -> int:
    """The number of token ids of the policy in this directory. Raises ConfigError."""
    try:
        return int(json.loads((model / "config.json").read_text())["vocab_size"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"--model {model}: no vocab_size in {model / 'config.json'} ({type(error).__name__}).",
            remedy="Name a directory as save_pretrained makes it, or leave --model out.",
        ) from error


def bind(host: str, port: int) -> socket.socket:
    """A listening address. Raises ConfigError if another process has it; that process is not touched."""
    try:
        found = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        raise ConfigError(
            f"cannot listen on {host!r}, which is not an address of this machine: {error.strerror}."
        ) from error
    family, kind, protocol, _, address = found[0]
    made = socket.socket(family, kind, protocol)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        made.bind(address)
        made.listen(1)  # else a second server could bind the same address and fail only later
    except OSError as error:
        made.close()
        is_taken = error.errno == errno.EADDRINUSE
        raise ConfigError(
            f"cannot listen on port {port} of {host}: {error.strerror}.",
            remedy="Another process may listen there (ss -ltnp shows which); end it yourself, or choose --port."
            if is_taken
            else "Give an address of this machine with --host, and with --port one that you may use: 1024 or more.",
        ) from error
    made.setblocking(False)
    return made


async def _serve(
    options: ServeOptions, listening: socket.socket, token: bytes | None, vocabulary: int, tls: ssl.SSLContext | None
) -> None:
    mark = Path(options.directory) / RUNNING if options.journal else None
    if options.journal or options.same_host:
        _close_to_others(options.directory)
    # before the journal is opened, which writes to it
    killed_at = _killed_at(options.directory) if mark is not None and mark.exists() else None
    service = Service.open(options)
    try:
        if mark is not None:
            mark.touch()
        app = App(service, options, token=token, vocabulary=vocabulary, killed_at=killed_at)
        gate = Gate(
            options.request_s,
            options.connections,
            check_users=token is None,
            refused=service.counters.refused,
            refusals=REFUSALS,
        )
        async with contextlib.AsyncExitStack() as stack:
            await _same_host(service, options, app, stack)
            _say(options, service, listening.getsockname()[1], token is not None)
            _spare_the_collector()
            await Server(app, gate, app.stop, tls).serve(sockets=[listening])
        console.say(
            "ended; " + ("what was acknowledged is in the journal." if options.journal else "nothing was kept.")
        )
    finally:
        await service.close()
    if mark is not None:
        mark.unlink(missing_ok=True)


async def _same_host(service: Service, options: ServeOptions, app: App, stack: contextlib.AsyncExitStack) -> None:
    """Open the endpoint for shared-memory rings, if this system supports them."""
    if not options.same_host:
        return
    from atropos_trajectory_api.native.same_host import listening

    await stack.enter_async_context(listening(service, options, app.budget))


def _killed_at(directory: Path) -> float:
    """The time at which a killed server last stored something: a group in its journal, or a piece of one."""
    kept = (path for part in ("journal", "pieces") for path in (directory / part).rglob("*"))
    times = [path.stat().st_mtime for path in kept if path.is_file()]
    return max(times, default=(directory / RUNNING).stat().st_mtime)


def _say(options: ServeOptions, service: Service, port: int, with_token: bool) -> None:
    scheme = "https" if options.tls_cert else "http"
    host = "127.0.0.1" if options.host in ("0.0.0.0", "::", "localhost") else options.host
    url = f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"
    hub = service.hub.status()
    waiting = f"{hub.groups} groups wait in it" if hub.groups else "nothing waits in it"
    kept = (
        f"journal in {options.directory} ({options.sync}): {waiting}"
        if options.journal
        else "no journal: its groups are lost when it ends"
    )
    token = " --token-file FILE" if with_token else ""
    old = url.replace("://", "://any:TOKEN@") if with_token else url
    console.say(f"listening on {url} ({options.host}:{port}), up to {options.hub_mb:g} MB; {kept}")
    console.facts(
        [
            ("trainer", f"atropos train RUN.toml --api {url}{token}"),
            ("worker", f"atropos env NAME --api {url}{token}"),
            ("atroposlib", f"python environment.py serve --env.rollout_server_url {old}"),
            ("metrics", f"{url}/metrics   document: {url}/openapi.json"),
        ]
    )


def _spare_the_collector() -> None:
    """Exclude the present objects from Python's garbage collector, which would otherwise scan them again and again when there are
    many short connections."""
    gc.collect()
    gc.freeze()


def _loop_factory() -> Any:
    try:
        import uvloop
    except ModuleNotFoundError:  # not made for this system; asyncio's own loop does the same, more slowly
        return None
    return uvloop.new_event_loop

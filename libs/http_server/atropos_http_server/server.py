"""Our HTTP servers: uvicorn with our connections and limits, as a process or inside another program's event loop."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import socket
import ssl
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send

from atropos_core.errors import ConfigError, DeadlineExceeded
from atropos_http_server.connection import SCOPE_KEY, Connection, connections
from atropos_http_server.connection_limits import AT_ONCE, SAY_AGAIN_S, Gate
from atropos_http_server.tls import TlsListener

START_S = 10.0
BACKLOG = 1024  # connections that the kernel keeps until they are accepted


class HttpServer(uvicorn.Server):
    """uvicorn's server, which accepts few connections at a time and leaves the rest to the kernel: asyncio would accept the whole
    backlog before any is processed. It gets its sockets; with `tls`, it accepts from them itself."""

    def __init__(
        self,
        app: ASGIApp,
        gate: Gate,
        *,
        lifespan: bool,
        stop: Callable[[], None],
        grace_s: int,
        keep_alive_s: int,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        """`stop` is called when the server begins to end: everything that waits must be told then (`Limits.stop`, and waits of the
        application). `grace_s`: for answers in progress at the end. `keep_alive_s`: for a connection between two requests. An `app`
        may have `at_once`: per method and URL, how to answer a request that arrives whole without waiting."""
        logging.getLogger("asyncio").addFilter(_ONCE_A_MINUTE)
        config = uvicorn.Config(
            _Granted(app, gate),
            http=connections(gate, app),
            ws="none",
            lifespan="on" if lifespan else "off",
            log_config=None,
            log_level="warning",
            access_log=False,  # addresses and queries are private
            server_header=False,
            proxy_headers=False,  # and a proxy's claims about clients are not trusted
            backlog=AT_ONCE,
            timeout_keep_alive=keep_alive_s,
            timeout_graceful_shutdown=grace_s,
        )
        super().__init__(config)
        self._gate = gate
        self._stop = stop
        self._tls = tls
        self._listeners: list[TlsListener] = []

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        given = sockets or []
        await super().startup(given if self._tls is None else [])
        for one in given:
            one.listen(BACKLOG)
            if self._tls is not None:
                self._listeners.append(TlsListener(one, self._tls, self._gate, self._connection))

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._stop()
        for listener in self._listeners:
            await listener.close()
        await super().shutdown(sockets)

    def _connection(self) -> Connection:
        made: type[Connection] = self.config.http_protocol_class  # type: ignore[assignment]
        return made(config=self.config, server_state=self.server_state, app_state=self.lifespan.state)


class _Granted:
    """Wraps the application. If a call is not over when the server's time is, the client is told so; uvicorn would answer 500, and print
    a traceback for each. If the application raises, the client is told what failed."""

    def __init__(self, app: ASGIApp, gate: Gate) -> None:
        self._app = app
        self._gate = gate

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._app(scope, receive, send)
        except asyncio.CancelledError:
            connection: Connection | None = scope.get(SCOPE_KEY)
            if connection is None:  # the application's own start and end
                raise
            if not connection.has_begun:
                await self._gate.ending(scope, receive, send)
            elif not connection.is_gone:
                connection.transport.abort()
                await asyncio.sleep(0)  # in which the connection learns that it is over
        except Exception as error:
            connection = scope.get(SCOPE_KEY)
            if connection is not None and not (connection.has_begun or connection.is_gone):
                await self._gate.failed(scope, send, error)
            raise  # uvicorn writes the traceback, and closes the connection


class _GuestServer(HttpServer):
    """A server whose process handles signals itself."""

    def __init__(self, app: ASGIApp, gate: Gate, *, stop: Callable[[], None], grace_s: int, keep_alive_s: int) -> None:
        super().__init__(app, gate, lifespan=False, stop=stop, grace_s=grace_s, keep_alive_s=keep_alive_s)
        self.listens = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.listens.set()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class ListenOptions(NamedTuple):
    """The options that set a server's host and port, as a person types them; empty if there is none."""

    host: str = ""
    port: str = ""


class RunningServer:
    """Serves at `url`, which has no path, until `close`; made by `serve_in_loop`."""

    def __init__(self, url: str, server: uvicorn.Server, serving: asyncio.Task[None]) -> None:
        self.url = url
        self._server = server
        self._serving = serving

    async def close(self) -> None:
        """Tell waiting clients that the server ends. Answers in progress may finish within the grace time. Raises the error that ended
        the server before, if any."""
        self._server.should_exit = True
        await self._serving


async def serve_in_loop(
    app: ASGIApp,
    gate: Gate,
    host: str,
    port: int,
    *,
    stop: Callable[[], None],
    grace_s: int,
    keep_alive_s: int,
    options: ListenOptions = ListenOptions(),  # noqa: B008 - immutable
) -> RunningServer:
    """Serve `app` inside the running loop of a process that has other work. Port 0 is any free one; for the rest see `HttpServer`.
    `options`: what the user set host and port with. Raises ConfigError, which names these options, if it cannot listen there,
    and DeadlineExceeded."""
    bound = _bind(host, port, options)
    url = f"http://{f'[{host}]' if ':' in host else host}:{bound.getsockname()[1]}"
    server = _GuestServer(app, gate, stop=stop, grace_s=grace_s, keep_alive_s=keep_alive_s)
    serving = asyncio.create_task(server.serve([bound]))
    running = RunningServer(url, server, serving)
    listens = asyncio.create_task(server.listens.wait())
    try:
        await asyncio.wait({listens, serving}, timeout=START_S, return_when=asyncio.FIRST_COMPLETED)
        if not listens.done():
            await running.close()
            raise DeadlineExceeded(f"the server at {url} did not open within {START_S:g} s")
    except OSError as error:
        raise _listen_error(host, port, error, options) from error
    finally:
        listens.cancel()
    return running


def check_port(host: str, port: int, options: ListenOptions) -> None:
    """Raises the ConfigError of `serve_in_loop`, before anything has been started that takes time."""
    _bind(host, port, options).close()


def _bind(host: str, port: int, options: ListenOptions) -> socket.socket:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        bound = socket.socket(family, kind, protocol)
        try:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            bound.bind(address)
        except BaseException:
            bound.close()
            raise
        return bound
    except OSError as error:
        raise _listen_error(host, port, error, options) from error


def _listen_error(host: str, port: int, error: OSError, options: ListenOptions) -> ConfigError:
    another = f"give another port{f' with {options.port}' if options.port else ''}; 0 takes any free one."
    if error.errno == errno.EADDRINUSE:
        return ConfigError(
            f"nothing can listen at {host}:{port}: another process has that port, such as a server of another run.",
            remedy=f"End it (`ss -ltnp sport = :{port}` shows which it is), or {another}",
        )
    said = f"nothing can listen at {host}:{port}: {error.strerror or error}."
    if error.errno in (errno.EACCES, errno.EPERM):
        return ConfigError(said, remedy=f"A port below 1024 needs rights that this user lacks: {another}")
    return ConfigError(
        said, remedy=f"Give an address of this machine{f' with {options.host}' if options.host else ''}, as 127.0.0.1."
    )


class _OnceAMinute(logging.Filter):
    """asyncio reports that the process has no descriptors left for each connection, many times a second; this limits it."""

    def __init__(self) -> None:
        super().__init__()
        self._warned_at = -SAY_AGAIN_S

    def filter(self, record: logging.LogRecord) -> bool:
        if "accept() out of system resource" not in str(record.msg):
            return True
        now = time.monotonic()
        if now - self._warned_at < SAY_AGAIN_S:
            return False
        self._warned_at = now
        return True


_ONCE_A_MINUTE = _OnceAMinute()  # one for the process, as its loggers are

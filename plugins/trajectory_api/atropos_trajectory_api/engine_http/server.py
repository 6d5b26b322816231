"""The HTTP endpoint of an engine, inside a process that also does other work."""

from __future__ import annotations

from pathlib import Path

from starlette.types import Receive, Scope, Send

from atropos_core.errors import AtroposError, ConfigError
from atropos_core.interfaces import Engine, ModelInfo, Transport
from atropos_http_server.answers import Refusals
from atropos_http_server.body_limits import Limits
from atropos_http_server.connection_limits import Gate
from atropos_http_server.loopback import require_token
from atropos_http_server.server import ListenOptions, RunningServer, serve_in_loop
from atropos_http_server.tokens import read_server_token
from atropos_trajectory_api.engine_http.routes import EngineRoutes, engine_app, is_upload
from atropos_trajectory_api.http.access import Access
from atropos_trajectory_api.http.answers import body_cost, refuse

KEEP_ALIVE_S = 3600
CONNECTIONS = 512
GRACE_S = 2  # for unfinished answers at the end
BODY_BYTES = 16_000_000  # of one call of a worker: prompts, or sequences to score
TRAINER_BODY_BYTES = (
    1 << 28
)  # of one call of a trainer, whose bridge may send pieces of an update this way; uploads are not bounded
REQUEST_S = 60.0  # for a call to arrive


class RunningEngineServer:
    """Serves until `close`."""

    def __init__(self, app: EngineRoutes, server: RunningServer) -> None:
        self.url = server.url
        self._app = app
        self._server = server

    async def close(self) -> None:
        """Raises the error that ended the server before, if any."""
        try:
            await self._server.close()
        finally:
            self._app.close()


async def open_engine_server(
    engine: Engine,
    where: str,
    token_file: Path | None,
    info: ModelInfo | None = None,
    *,
    takes: Transport | None = None,
    extension: str = "",
    grace_s: int = GRACE_S,
    options: ListenOptions = ListenOptions("api.engine_address", "api.engine_address"),  # noqa: B008 - immutable
) -> RunningEngineServer:
    """Let others sample from `engine`, which is open (`info`), at `where`, HOST:PORT, and send it the weights that it `takes`. The
    bridge's code in the engine's process is `extension`. `options`: the options with which the user set `where`. Raises ConfigError if
    that is not possible or not allowed."""
    host, port = address(where)
    token = None if token_file is None else read_server_token(token_file)
    require_token(
        host,
        given=token is not None,
        what="the engine needs a token",
        remedy="Name a file that holds one: --token-file FILE (in a run file, api.token_file), the same for server and workers.",
    )
    app = engine_app(engine, takes, info, extension=extension)
    body_bytes = BODY_BYTES if takes is None else TRAINER_BODY_BYTES
    limits = Limits(
        app,
        body_bytes=body_bytes,
        in_flight_bytes=max(8 * BODY_BYTES, body_bytes),
        request_s=REQUEST_S,
        hold_s=REQUEST_S,
        cost=body_cost,
        refusals=Refusals(refuse),
    )

    async def bounded(scope: Scope, receive: Receive, send: Send) -> None:
        """Limit bodies, except files of weights: these may have any size, and are written piece by piece."""
        await (app if takes is not None and is_upload(scope) else limits)(scope, receive, send)

    gate = Gate(REQUEST_S, CONNECTIONS, check_users=token is None, refusals=Refusals(refuse))
    try:
        server = await serve_in_loop(
            Access(bounded, token=token),
            gate,
            host,
            port,
            stop=limits.stop,
            grace_s=grace_s,
            keep_alive_s=KEEP_ALIVE_S,
            options=options,
        )
    except AtroposError:
        app.close()
        raise
    return RunningEngineServer(app, server)


def address(where: str) -> tuple[str, int]:
    """Split HOST:PORT. Raises ConfigError."""
    host, colon, port = where.rpartition(":")
    host = host.strip("[]")
    if not colon or not host or not port.isdigit() or int(port) > 65535:
        raise ConfigError(f"{where!r} is not HOST:PORT, like 127.0.0.1:8001; port 0 is any free one.")
    if host in ("0.0.0.0", "::"):
        raise ConfigError(
            f"{where!r} means every address of this machine, but workers need one of them.",
            remedy="Give the name or address by which workers reach this machine.",
        )
    return host, int(port)

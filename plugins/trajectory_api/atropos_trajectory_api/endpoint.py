"""How both servers, that of the trajectory API and that of an engine, speak HTTP: the same connections, the same bounds."""

from __future__ import annotations

import logging
import socket
import time
from pathlib import Path

import uvicorn
from starlette.types import ASGIApp

from atropos_trajectory_api.connection import connections
from atropos_trajectory_api.gate import AT_ONCE, SAY_AGAIN_S, Gate

BACKLOG = 1024  # connections that the kernel keeps until they are accepted


def http_config(
    app: ASGIApp,
    gate: Gate,
    *,
    lifespan: bool,
    grace_s: int,
    keep_alive_s: int,
    tls_cert: Path | None = None,
    tls_key: Path | None = None,
) -> uvicorn.Config:
    """`grace_s` for the answers that are under way at the end; `keep_alive_s` for a connection between two requests."""
    logging.getLogger("asyncio").addFilter(_ONCE_A_MINUTE)
    return uvicorn.Config(
        app,
        http=connections(gate),
        ws="none",
        lifespan="on" if lifespan else "off",
        log_config=None,
        log_level="warning",
        access_log=False,  # addresses and queries are nobody's business
        server_header=False,
        proxy_headers=False,  # nor whoever a proxy says they are
        backlog=AT_ONCE,
        timeout_keep_alive=keep_alive_s,
        timeout_graceful_shutdown=grace_s,
        ssl_certfile=tls_cert,
        ssl_keyfile=tls_key,
    )


class HttpServer(uvicorn.Server):
    """uvicorn's, which accepts few connections at a time and lets the kernel keep the rest: asyncio accepts as many as the
    backlog has before it lets any of them be looked at."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for one in sockets or ():
            one.listen(BACKLOG)


class _OnceAMinute(logging.Filter):
    """asyncio says of each connection that it cannot take that the process has no descriptors left, many times a second."""

    def __init__(self) -> None:
        super().__init__()
        self._said_at = -SAY_AGAIN_S

    def filter(self, record: logging.LogRecord) -> bool:
        if "accept() out of system resource" not in str(record.msg):
            return True
        now = time.monotonic()
        if now - self._said_at < SAY_AGAIN_S:
            return False
        self._said_at = now
        return True


_ONCE_A_MINUTE = _OnceAMinute()  # one for the process, as its loggers are

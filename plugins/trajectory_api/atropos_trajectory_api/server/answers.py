"""Plain ASGI answers, for the routes where a framework's share of the time would be most of it."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Iterable, Mapping
from typing import Any

from starlette.types import Scope, Send

from atropos_core.errors import AtroposError

COMPRESS_FROM = 1000  # bytes; as atroposlib's server
ASIDE_FROM = 1 << 18  # compressing more than this would hold up everyone else
PIECE = 1 << 16

Headers = Iterable[tuple[bytes, bytes]]


def header(scope: Scope, name: bytes) -> bytes | None:
    for key, value in scope["headers"]:
        if key == name:
            return bytes(value)
    return None


async def answer(scope: Scope, send: Send, status: int, value: Any, headers: Headers = ()) -> None:
    """JSON, compressed where the client wants that and it is long."""
    from atropos_trajectory_api.legacy.incoming_groups import dumps

    body, more = await encoded(scope, dumps(value))
    await send_whole(send, status, body, [(b"content-type", b"application/json"), *more, *headers])


async def encoded(scope: Scope, body: bytes) -> tuple[bytes, list[tuple[bytes, bytes]]]:
    """The body as the client wants it, and the headers that say so."""
    if len(body) < COMPRESS_FROM or b"gzip" not in (header(scope, b"accept-encoding") or b""):
        return body, []
    squeezed = _squeeze(body) if len(body) < ASIDE_FROM else await asyncio.to_thread(_squeeze, body)
    return squeezed, [(b"content-encoding", b"gzip"), (b"vary", b"Accept-Encoding")]


def _squeeze(body: bytes) -> bytes:
    return zlib.compress(body, level=1, wbits=31)  # 17 ms for what costs level 9 198 ms, and 8 % longer


async def send_whole(send: Send, status: int, body: bytes, headers: Headers) -> None:
    await start(send, status, len(body), headers)
    await send({"type": "http.response.body", "body": body})


async def start(send: Send, status: int, size: int, headers: Headers) -> None:
    fields = [*headers, (b"content-length", b"%d" % size)]
    await send({"type": "http.response.start", "status": status, "headers": fields})


async def plain_error(
    scope: Scope, send: Send, status: int, kind: str, message: str, remedy: str | None = None, headers: Headers = ()
) -> None:
    """An error in the form that the route's clients know: `detail` for atroposlib's, `error` for ours."""
    if scope["path"].startswith("/v1"):
        value: Mapping[str, Any] = {"error": {"kind": kind, "message": message, "remedy": remedy}}
    else:
        text = f"{message} {remedy}" if remedy else message
        value = {"detail": [{"type": "value_error", "loc": ["body"], "msg": text}] if status == 422 else text}
    await answer(scope, send, status, value, headers)


async def refuse(scope: Scope, send: Send, status: int, error: AtroposError, headers: Headers = ()) -> None:
    await plain_error(scope, send, status, type(error).__name__, Exception.__str__(error), error.remedy, headers)

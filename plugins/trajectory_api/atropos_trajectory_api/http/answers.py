"""JSON answers and errors, for routes in which a framework would take most of the time."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Mapping
from typing import Any

from starlette.types import Scope, Send

from atropos_core.errors import AtroposError, TooLarge
from atropos_http_server.answers import Headers, Refusals, header, send_whole
from atropos_http_server.body_limits import JSON_COST
from atropos_trajectory_api.legacy_groups.wire_json import dumps

COMPRESS_FROM = 1000  # bytes, as in atroposlib's server
ASIDE_FROM = 1 << 18  # compressing more than this on the event loop would delay all others
PIECE = 1 << 16
JSON = [(b"content-type", b"application/json")]


async def answer(scope: Scope, send: Send, status: int, value: Any, headers: Headers = ()) -> None:
    """Send JSON, compressed if the client wants that and it is long."""
    body, more = await encoded(scope, dumps(value))
    await send_whole(send, status, body, [*JSON, *more, *headers])


async def encoded(scope: Scope, body: bytes) -> tuple[bytes, list[tuple[bytes, bytes]]]:
    """The body in the client's encoding, and the headers that name it."""
    if len(body) < COMPRESS_FROM or b"gzip" not in (header(scope, b"accept-encoding") or b""):
        return body, []
    squeezed = _squeeze(body) if len(body) < ASIDE_FROM else await asyncio.to_thread(_squeeze, body)
    return squeezed, [(b"content-encoding", b"gzip"), (b"vary", b"Accept-Encoding")]


def _squeeze(body: bytes) -> bytes:
    return zlib.compress(body, level=1, wbits=31)  # 17 ms instead of 198 ms at level 9, and 8 % longer


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
    if isinstance(error, TooLarge) and not scope["path"].startswith("/v1"):
        status = 422  # any 4xx makes old clients drop a group silently, but they look at the text of a 422
    await plain_error(scope, send, status, type(error).__name__, Exception.__str__(error), error.remedy, headers)


def body_cost(scope: Scope) -> int:
    """Our bodies are read as bytes, those of old clients as JSON."""
    return 1 if scope["path"].startswith("/v1") else JSON_COST


REFUSALS = Refusals(
    refuse,
    request_s="`atropos serve --request-s`",
    connections="`atropos serve --connections`",
    body="`atropos serve --body-mb`",
    in_flight="`atropos serve --in-flight-mb`",
)

"""HTTP whose bodies are codec frames: a table of handlers as one bare ASGI application.

A body is one frame that holds a mapping; so is an answer. An error is JSON: {"error": {"kind", "message", "remedy"}},
where `kind` is a class of atropos_core.errors that the client raises again. A client that hangs up ends its call.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, overload

from starlette.types import Receive, Scope, Send

from atropos_core.codec import Buffer, encode
from atropos_core.errors import (
    AccessRefused,
    ApiError,
    AtroposError,
    DataError,
    DeadlineExceeded,
    HubClosed,
    HubFull,
    LeaseLost,
    TokenizerMismatch,
)
from atropos_core.group_schema import ID_BOUND, brief, check_sampling
from atropos_core.guards.worker_threads import apart
from atropos_core.types import Sampling
from atropos_http_server.answers import header
from atropos_trajectory_api.groups.frame_check import read_frame
from atropos_trajectory_api.misspelt import refuse_misspelt
from atropos_trajectory_client.client import CONTENT_TYPE, UnknownThere

Handler = Callable[["Request"], Coroutine[Any, Any, Any]]
MAX_WAIT_S = 60.0
MAX_BODY_BYTES = 1 << 30
MOST_CHARACTERS = 4096  # of a text in a body: a path is the longest
LONG_BYTES = 1 << 18  # a body of this size is read outside the event loop, which has other clients to answer
DESCRIBED = "The server's /openapi.json describes each call. atropos_trajectory_client makes them all."
_HEADERS = [(b"content-type", CONTENT_TYPE.encode())]


def _names_of(kind: type[Any] | tuple[type[Any], ...]) -> str:
    return " or ".join(one.__name__ for one in (kind if isinstance(kind, tuple) else (kind,)))


class Gone(Exception):
    """The client hung up, which is not an error."""


class Request:
    """One call: the values in its path and its body. Each access checks, and raises DataError."""

    def __init__(self, named: str, body: Any, scope: Scope) -> None:
        self.named = named  # the worker or the session
        self.scope = scope
        self._body = body if body is not None else {}
        if not isinstance(self._body, dict):
            raise DataError(f"the body must be a mapping, not a {type(body).__name__}", remedy=DESCRIBED)

    @property
    def body(self) -> Mapping[str, Any]:
        return self._body

    def get(self, key: str, kind: type[Any] | tuple[type[Any], ...], default: Any = ...) -> Any:
        value = self._body.get(key, default)
        if key not in self._body:
            refuse_misspelt(self._body, (key,))
        if value is ...:
            raise DataError(f"the body lacks {key!r}", remedy=DESCRIBED)
        if value is not default and (not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool)):
            raise DataError(f"{key!r} cannot be a {type(value).__name__}", remedy=f"Send {_names_of(kind)}.")
        if isinstance(value, str) and len(value) > MOST_CHARACTERS:
            raise DataError(
                f"{key!r} has {len(value)} characters, more than {MOST_CHARACTERS}", remedy="Send a shorter text."
            )
        return value

    def count(self, key: str, default: Any = ..., *, least: int = 0) -> int:
        value = int(self.get(key, int, default))
        if not least <= value < ID_BOUND:
            raise DataError(
                f"{key!r} cannot be {brief(value)}", remedy=f"Send a whole number from {least} to {ID_BOUND - 1}."
            )
        return value

    @overload
    def number(
        self, key: str, default: float = ..., *, least: float = ..., above: float = ..., most: float
    ) -> float: ...

    @overload
    def number(
        self, key: str, default: None, *, least: float = ..., above: float = ..., most: float
    ) -> float | None: ...

    def number(
        self, key: str, default: Any = ..., *, least: float = -math.inf, above: float = -math.inf, most: float
    ) -> float | None:
        """A number, compared before it is made a float, since it may have any number of digits. None if that is the default."""
        value = self.get(key, (int, float), default)
        if value is None:
            return None
        if not (least <= value <= most and above < value):
            bounds = f"from {least:g}" if math.isfinite(least) else f"above {above:g} and"
            raise DataError(f"{key!r} cannot be {brief(value)}", remedy=f"Send a number {bounds} up to {most:g}.")
        return float(value)

    def wait_s(self) -> float:
        return min(self.number("wait_s", 0.0, least=0, most=1e6), MAX_WAIT_S)

    def sampling(self) -> Sampling:
        given: Sampling = self.get("sampling", Sampling, Sampling())
        check_sampling(given)
        return given

    def session(self) -> int:
        """The number in the path."""
        if not self.named.isascii() or not self.named.isdigit() or len(self.named) > 18:
            raise DataError(
                f"{self.named[:40]!r} is not the number of a session", remedy="POST /v1/sessions answers it."
            )
        return int(self.named)


class FrameApp:
    """All of `/v1` as one bare ASGI application: no framework between the socket and a handler. `waits` says if the answer to a
    body may take a while; only then is the connection watched for a client that hangs up."""

    def __init__(
        self, table: Mapping[tuple[str, str], Handler], waits: Callable[[Any], bool] = lambda value: True
    ) -> None:
        self._table = table
        self._waits = waits
        self._patterns = {pattern for _, pattern in table}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        _, *named = scope["path"].strip("/").split("/")
        pattern = "/".join(named)
        if pattern not in self._patterns:
            pattern = "/".join(["*" if place == 1 else name for place, name in enumerate(named)])
        status, headers = 200, _HEADERS
        answer: list[Buffer]
        try:
            handler = self._table.get((scope["method"], pattern)) or self._nothing(scope["method"], pattern)
            scope["atropos.route"] = f"{scope['method']} /v1/{pattern}"
            body = await read_body(receive)
            value = await read_frame_of(body) if body else None
            request = Request(named[1] if len(named) > 1 else "", value, scope)
            given = await (unless_gone(handler(request), receive) if self._waits(value) else handler(request))
            if scope["method"] == "GET" and b"application/json" in (header(scope, b"accept") or b""):  # for people
                headers, answer = [(b"content-type", b"application/json")], [json.dumps(given).encode()]
            else:
                answer = encode(given)
        except Gone:
            return
        except (AtroposError, NotImplementedError) as error:
            status, headers, answer = refusal(error)
        raw = b"".join(answer)
        length = [(b"content-length", str(len(raw)).encode())]
        await send({"type": "http.response.start", "status": status, "headers": [*headers, *length]})
        await send({"type": "http.response.body", "body": raw})

    def _nothing(self, method: str, pattern: str) -> Handler:
        if pattern in self._patterns:
            known = " or ".join(sorted(one for one, own in self._table if own == pattern))
            raise WrongMethod(f"/v1/{pattern} does not take {method[:20]}.", remedy=f"Use {known}.")
        raise NoSuchRoute(
            "this call of /v1 does not exist.", remedy="Is the client of the same version as this server?"
        )


class NoSuchRoute(ApiError):
    """The path does not exist."""


class WrongMethod(ApiError):
    """The path exists, but for another method."""


STATUS: Mapping[type[Exception], int] = {
    NotImplementedError: 501,
    UnknownThere: 404,
    NoSuchRoute: 404,
    WrongMethod: 405,
    AccessRefused: 403,
    LeaseLost: 409,
    TokenizerMismatch: 409,
    DataError: 422,
    HubFull: 503,
    HubClosed: 503,
    DeadlineExceeded: 503,
    ApiError: 400,
}


def refusal(error: AtroposError | NotImplementedError) -> tuple[int, list[tuple[bytes, bytes]], list[Buffer]]:
    """Status, headers and body of an error."""
    status = next((STATUS[kind] for kind in type(error).__mro__ if kind in STATUS), 400)
    headers = [(b"content-type", b"application/json")]
    if status == 503:
        headers.append((b"retry-after", b"1"))
    return status, headers, [json.dumps({"error": error_record(error)}).encode()]


def error_record(error: AtroposError | NotImplementedError) -> dict[str, Any]:
    """A record from which the client raises the same error."""
    return {
        "kind": type(error).__name__,
        "message": Exception.__str__(error),
        "remedy": getattr(error, "remedy", None),
    }


async def read_frame_of(body: bytes) -> Any:
    """The value of a body's frame. Raises DataError."""
    try:
        return await apart(read_frame, body) if len(body) >= LONG_BYTES else read_frame(body)
    except DataError as error:
        error.remedy = error.remedy or f"A body is a frame of atropos_core.codec, not JSON. {DESCRIBED}"
        raise


async def read_body(receive: Receive) -> bytes:
    """The whole body. If many clients may call, closer limits are enforced before this."""
    pieces, size = [], 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise Gone
        pieces.append(message.get("body", b""))
        size += len(pieces[-1])
        if size > MAX_BODY_BYTES:
            raise DataError(
                f"a body of more than {MAX_BODY_BYTES / 1e6:.0f} MB is refused", remedy="Send less at once."
            )
        if not message.get("more_body", False):
            return b"".join(pieces) if len(pieces) > 1 else pieces[0]


async def unless_gone(work: Coroutine[Any, Any, Any], receive: Receive) -> Any:
    """The result of `work`. If the client hangs up first, cancels the work and raises Gone."""
    working = asyncio.ensure_future(work)
    await asyncio.sleep(0)
    if working.done():  # most calls need not wait
        return working.result()
    hanging_up = asyncio.ensure_future(_hung_up(receive))
    try:
        await asyncio.wait({working, hanging_up}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise Gone
    finally:
        for task in (working, hanging_up):
            task.cancel()


async def _hung_up(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass

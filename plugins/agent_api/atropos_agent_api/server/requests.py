"""The common parts of every call: a method, a key, a JSON body."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import numpy as np
import orjson
from starlette.types import Receive, Scope

from atropos_agent_api.calls import CallRefused
from atropos_core.guards.worker_threads import LONG, apart
from atropos_http_server.answers import header
from atropos_http_server.body_limits import SHARE_KEY, Share

BEARER = b"bearer "
CALL_BYTES = 8_000_000  # of the body of a call; reports of episodes contain files, and may be larger
MOST_VALUES = 100_000  # texts, objects and lists in a body: a conversation of 5,000 messages has some 50,000
MOST_NUMBERS = 1_000_000  # separators, since a prompt may be a list of ids
MOST_DEPTH = 120  # nesting of a body; schemas and arguments may be DEEPEST deep inside their calls
_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"', re.DOTALL)
_STEPS = bytes({91: 1, 123: 1, 93: 255, 125: 255}.get(one, 0) for one in range(256))  # +1 into a value, -1 out of it
_NO_STEPS = bytes(one for one in range(256) if not _STEPS[one])

T = TypeVar("T")


async def read(
    scope: Scope,
    receive: Receive,
    reader: Callable[[Mapping[str, Any]], T],
    *,
    may_be_empty: bool = False,
    most_bytes: int = CALL_BYTES,
) -> T:
    """Read the body, which `Limits` passes on whole, with `reader`. A long body is read outside the event loop. Raises CallRefused
    for a body that is not a JSON object or that contains too much, and what `reader` raises."""
    body = (await receive()).get("body", b"")
    if len(body) > most_bytes:
        raise CallRefused(
            f"the body of this call has {len(body) / 1e6:.1f} MB, but at most {most_bytes / 1e6:g} are allowed: send less.",
            status=413,
            code="request_too_large",
        )

    def given() -> T:
        return reader({} if may_be_empty and not body else object_of(body))

    found = await apart(given) if len(body) > LONG else given()
    share: Share | None = scope.get(SHARE_KEY)
    if share is not None:
        share.read()
    return found


def object_of(body: bytes) -> dict[str, Any]:
    """Parse the body. Raises CallRefused. A body with too many or too deep values is refused before parsing, which takes longest."""
    check_size(body)
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise CallRefused(f"the body is not JSON: {error}.", code="invalid_json") from None
    if not isinstance(value, dict):
        raise CallRefused("the body must be a JSON object: send one, with the fields of the call.", code="invalid_json")
    return value


def check_size(body: bytes) -> None:
    """Raises CallRefused for more values than a conversation has, or deeper ones."""
    # each text has at least one quote that is not escaped, and at most two: so these are more than MOST_VALUES texts
    if body.count(b'"') - body.count(b'\\"') > 2 * MOST_VALUES:
        raise _too_much(f"more than {MOST_VALUES:,} texts")
    bare, texts = _STRING.subn(b"", body)
    steps = np.frombuffer(bare.translate(_STEPS, _NO_STEPS), np.int8)
    if texts + int(np.count_nonzero(steps == 1)) > MOST_VALUES:
        raise _too_much(f"more than {MOST_VALUES:,} texts, objects and lists")
    if bare.count(b",") > MOST_NUMBERS:
        raise _too_much(f"more than {MOST_NUMBERS:,} values")
    if len(steps) and int(np.cumsum(steps, dtype=np.int32).max()) > MOST_DEPTH:
        raise _too_much(f"values nested more than {MOST_DEPTH} deep")


def _too_much(what: str) -> CallRefused:
    return CallRefused(f"the body has {what}: send a shorter or flatter one.", code="invalid_json")


def key_of(scope: Scope, where: str = "it is in the agent's environment") -> str:
    """The key of a request. Raises CallRefused, with `where` to find the key."""
    given = header(scope, b"x-api-key") or b""
    authorization = header(scope, b"authorization") or b""
    if authorization[: len(BEARER)].lower() == BEARER:
        given = authorization[len(BEARER) :].strip()
    if not given:
        raise CallRefused(
            f"the request has no key. Send `Authorization: Bearer KEY` or `x-api-key: KEY`: {where}.",
            status=401,
            code="missing_api_key",
        )
    return given.decode("latin-1")


def only(scope: Scope, method: str) -> None:
    if scope["method"] != method:
        raise CallRefused(f"use {method} here.", status=405, code="method_not_allowed")

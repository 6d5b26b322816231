"""What every call has: a method, a key, a body of JSON."""

from __future__ import annotations

from typing import Any

import orjson
from starlette.types import Receive, Scope

from atropos_agent_api.calls import CallRefused
from atropos_core.http_server.answers import header
from atropos_core.http_server.body_limits import SHARE_KEY, Share

BEARER = b"bearer "


async def value_of(scope: Scope, receive: Receive, *, may_be_empty: bool = False) -> dict[str, Any]:
    """The body, which `Limits` passes on whole. Raises CallRefused for what is no object of JSON."""
    body = (await receive()).get("body", b"")
    if may_be_empty and not body:
        return {}
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise CallRefused(f"the body is not JSON: {error}.", code="invalid_json") from None
    if not isinstance(value, dict):
        raise CallRefused("the body must be a JSON object.", code="invalid_json")
    share: Share | None = scope.get(SHARE_KEY)
    if share is not None:
        share.read()
    return value


def key_of(scope: Scope, where: str = "the agent's environment has it") -> str:
    """The key of a request. Raises CallRefused; `where` says where one is to be had."""
    given = header(scope, b"x-api-key") or b""
    authorization = header(scope, b"authorization") or b""
    if authorization[: len(BEARER)].lower() == BEARER:
        given = authorization[len(BEARER) :].strip()
    if not given:
        raise CallRefused(
            f"there is no key. Send `Authorization: Bearer KEY` or `x-api-key: KEY`: {where}.",
            status=401,
            code="missing_api_key",
        )
    return given.decode("latin-1")


def only(scope: Scope, method: str) -> None:
    if scope["method"] != method:
        raise CallRefused(f"this is called with {method}.", status=405, code="method_not_allowed")

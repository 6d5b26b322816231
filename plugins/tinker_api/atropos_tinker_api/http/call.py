"""One call over HTTP: its path, query and body, and the forms of an answer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple
from urllib.parse import parse_qs

import orjson
from starlette.types import Scope

from atropos_core.errors import DataError
from atropos_http_server.body_limits import SHARE_KEY, Share
from atropos_tinker_api.http.fields import Fields
from atropos_tinker_api.refused import Refused

JSON_BYTES = 4_000_000  # of a body in JSON: half a million tokens
JSON, PROTOBUF = b"application/json", b"application/x-protobuf"
MOST_LISTED = 1000


class Answer(NamedTuple):
    status: int
    content_type: bytes
    body: bytes


def answer(value: Mapping[str, Any], status: int = 200) -> Answer:
    return Answer(status, JSON, orjson.dumps(value))


class Call:
    """`parts`: what the address has in place of the names in the route."""

    def __init__(self, scope: Scope, body: bytes, parts: tuple[str, ...]) -> None:
        self.scope = scope
        self.body = body
        self.parts = parts

    def fields(self) -> Fields:
        """Return the body as JSON. Raises DataError, Refused."""
        if len(self.body) > JSON_BYTES:
            raise Refused(
                f"the body has {len(self.body) / 1e6:.1f} MB, and a body in JSON may have {JSON_BYTES / 1e6:g} MB.",
                status=413,
            )
        try:
            value = orjson.loads(self.body or b"{}")
        except orjson.JSONDecodeError as error:
            raise DataError(f"the body is not JSON: {error}.") from None
        share: Share | None = self.scope.get(SHARE_KEY)
        if share is not None:
            share.read()
        return Fields(value)

    def page(self, limit: int) -> tuple[int, int]:
        """Return limit and offset of a list. Raises DataError."""
        query = parse_qs(self.scope.get("query_string", b"").decode("latin-1"), max_num_fields=20)
        found = []
        for name, default in (("limit", limit), ("offset", 0)):
            text = query.get(name, [str(default)])[0]
            if not (text.isascii() and text.isdigit() and len(text) < 10):
                raise DataError(f"{name} must be a whole number.")
            found.append(int(text))
        return min(found[0], MOST_LISTED), found[1]

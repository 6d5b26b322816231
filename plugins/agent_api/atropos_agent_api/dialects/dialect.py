"""The interface of an API, and of a request that was read."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Protocol

import orjson

from atropos_agent_api.calls import Answer, Call, CallRefused


class Request(Protocol):
    """A request that was read: the call, and how to write its answer."""

    @property
    def call(self) -> Call: ...

    @property
    def streams(self) -> bool: ...

    def body(self, answer: Answer) -> Any:
        """The answer as JSON values."""

    def events(self, answer: Answer) -> Iterator[bytes]:
        """The answer as server-sent events, from the first to the last."""


class Dialect(Protocol):
    """One API. It keeps no state between requests."""

    request_id: bytes  # the header in which its clients look for the answer's id

    def read(self, body: Mapping[str, Any], hints: Mapping[str, str]) -> Request:
        """Raises CallRefused."""

    def error(self, refused: CallRefused) -> Any:
        """The error as JSON values, in the form that the API's clients expect."""

    def error_events(self, refused: CallRefused) -> Iterable[bytes]:
        """The error as events, after a stream has begun."""


def event(value: Any, name: str = "") -> bytes:
    """One server-sent event."""
    data = orjson.dumps(value)
    return b"event: %s\ndata: %s\n\n" % (name.encode(), data) if name else b"data: %s\n\n" % data

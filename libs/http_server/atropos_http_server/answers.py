"""Plain ASGI answers, and how a server refuses a request before its application is called."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from starlette.types import Scope, Send

from atropos_core.errors import AtroposError

Headers = Iterable[tuple[bytes, bytes]]


def header(scope: Scope, name: bytes) -> bytes | None:
    for key, value in scope["headers"]:
        if key == name:
            return bytes(value)
    return None


class WholeAnswer(NamedTuple):
    status: int
    headers: list[tuple[bytes, bytes]]
    body: bytes


class AnswerAtOnce(Protocol):
    """Optional method of an application, for requests that arrive whole: answer one without awaiting anything. Returns None if that is
    not possible; then nothing has happened, and the application is called as for any other request."""

    def __call__(self, scope: Scope, body: bytes) -> WholeAnswer | None: ...


def whole_answer(status: int, body: bytes, headers: Headers) -> WholeAnswer:
    return WholeAnswer(status, [*headers, (b"content-length", b"%d" % len(body))], body)


async def send_whole(send: Send, status: int, body: bytes, headers: Headers) -> None:
    await start(send, status, len(body), headers)
    await send({"type": "http.response.body", "body": body})


async def start(send: Send, status: int, size: int, headers: Headers) -> None:
    fields = [*headers, (b"content-length", b"%d" % size)]
    await send({"type": "http.response.start", "status": status, "headers": fields})


class Refuse(Protocol):
    """Answers with an error, in the form that the server's clients understand."""

    async def __call__(
        self, scope: Scope, send: Send, status: int, error: AtroposError, headers: Headers = ()
    ) -> None: ...


async def refuse_as_json(scope: Scope, send: Send, status: int, error: AtroposError, headers: Headers = ()) -> None:
    value = {"error": {"kind": type(error).__name__, "message": Exception.__str__(error), "remedy": error.remedy}}
    await send_whole(send, status, json.dumps(value).encode(), [(b"content-type", b"application/json"), *headers])


@dataclass(frozen=True)
class Refusals:
    """`answer` reports a refusal. The other fields are the command-line options that raise a limit of this server, "" if there is
    none."""

    answer: Refuse = refuse_as_json
    request_s: str = ""
    connections: str = ""
    body: str = ""
    in_flight: str = ""

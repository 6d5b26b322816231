"""One call over HTTP: read it, let its session answer, and write the answer as JSON or as events.

A turn is recorded before any byte of it is sent. Until then, a streaming client gets comments, so that proxies do not consider
the connection dead. From the first comment on the status is 200, and a later error is an event.
"""

from __future__ import annotations

import asyncio
import traceback
from collections.abc import Callable

import orjson
from starlette.types import Scope, Send

from atropos_agent_api.calls import Answer, CallRefused
from atropos_agent_api.dialects.dialect import Dialect, Request
from atropos_agent_api.sessions.session import Session
from atropos_core import console
from atropos_core.guards.worker_threads import apart
from atropos_http_server.answers import Headers, send_whole
from atropos_http_server.connection import SCOPE_KEY, Connection

LONG_TOKENS = 2_000  # an answer of this size is written outside the event loop
KEEP_ALIVE = b": keep-alive\n\n"
JSON = (b"content-type", b"application/json")
EVENTS = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
DO_NOT_RETRY = (
    b"x-should-retry",
    b"false",
)  # clients repeat calls that got 409 or 500, but the result would be the same


async def answer_whole(scope: Scope, send: Send, dialect: Dialect, request: Request, session: Session) -> None:
    """Answer in one piece. Raises CallRefused before anything was sent."""
    answer = await _answered(session, request)
    headers: Headers = [JSON, (dialect.request_id, answer.id.encode())]
    body = await _written(answer, lambda: orjson.dumps(request.body(answer)))
    if _is_there(scope, session, answer):
        await send_whole(send, 200, body, headers)


async def answer_in_events(
    scope: Scope, send: Send, dialect: Dialect, request: Request, session: Session, keep_alive_s: float
) -> None:
    """Answer as events. Raises CallRefused before anything was sent."""
    answering = asyncio.ensure_future(_answered(session, request))
    has_begun = False
    try:
        while not answering.done():
            await asyncio.wait({answering}, timeout=keep_alive_s)
            if not answering.done():
                if not has_begun:
                    await send({"type": "http.response.start", "status": 200, "headers": EVENTS})
                has_begun = True
                await send({"type": "http.response.body", "body": KEEP_ALIVE, "more_body": True})
    finally:
        answering.cancel()  # has no effect once it is done
    if not has_begun:
        answer = answering.result()
        data = await _written(answer, lambda: b"".join(request.events(answer)))
        headers: Headers = [*EVENTS, (dialect.request_id, answer.id.encode())]
        if _is_there(scope, session, answer):
            await send_whole(send, 200, data, headers)
        return
    try:
        answer = answering.result()
    except CallRefused as refused:
        await send({"type": "http.response.body", "body": b"".join(dialect.error_events(refused))})
        return
    data = await _written(answer, lambda: b"".join(request.events(answer)))
    if _is_there(scope, session, answer):
        await send({"type": "http.response.body", "body": data})


async def refuse(scope: Scope, send: Send, dialect: Dialect, refused: CallRefused, headers: Headers = ()) -> None:
    body = orjson.dumps(dialect.error(refused))
    await send_whole(send, refused.status, body, [JSON, DO_NOT_RETRY, *headers])


async def _answered(session: Session, request: Request) -> Answer:
    try:
        return await session.answer(request.call)
    except CallRefused:
        raise
    except Exception as error:  # an engine's or a renderer's: the agent gets an answer, and the log the traceback
        console.warn(f"a call of session {session.name!r} failed:\n{traceback.format_exc()}")
        raise CallRefused(
            f"the call failed: {type(error).__name__}; the run's output has more.", status=500, code="call_failed"
        ) from error


async def _written(answer: Answer, write: Callable[[], bytes]) -> bytes:
    return await apart(write) if answer.completion_tokens > LONG_TOKENS else write()


def _is_there(scope: Scope, session: Session, answer: Answer) -> bool:
    """Return True if the client can still read the answer. If not, none of it is sent, and the session is told. An answer that was
    sent counts even if the connection then closes, so a client cannot drop an answer that it does not like."""
    connection: Connection | None = scope.get(SCOPE_KEY)
    if connection is None or not connection.has_hung_up():
        return True
    session.not_delivered(answer.id)
    return False

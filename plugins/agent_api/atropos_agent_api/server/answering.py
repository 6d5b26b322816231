"""One call over HTTP: read, answered by its session, written as JSON or as events.

A turn is recorded before a byte of it leaves. Until it is there, a client that streams gets comments, so that nothing
between it and us takes the connection for dead; the status is 200 from the first of them on, and an error after it is an
event.
"""

from __future__ import annotations

import asyncio
import traceback
from collections.abc import Awaitable

import orjson
from starlette.types import Scope, Send

from atropos_agent_api.calls import Answer, CallRefused
from atropos_agent_api.dialects.dialect import Dialect, Request
from atropos_agent_api.sessions.session import Session
from atropos_core import console
from atropos_core.http_server.answers import Headers, send_whole
from atropos_core.http_server.connection import SCOPE_KEY, Connection

ARRIVES_S = 10.0  # that a client's machine has to take an answer
KEEP_ALIVE = b": keep-alive\n\n"
JSON = (b"content-type", b"application/json")
EVENTS = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
DO_NOT_RETRY = (
    b"x-should-retry",
    b"false",
)  # clients send what got 409 or 500 again by themselves: it would end the same


async def answer_whole(scope: Scope, send: Send, dialect: Dialect, request: Request, session: Session) -> None:
    """Raises CallRefused before anything was sent."""
    answer = await _answered(session, request)
    headers: Headers = [JSON, (dialect.request_id, answer.id.encode())]
    await _delivered(scope, session, answer, send_whole(send, 200, orjson.dumps(request.body(answer)), headers))


async def answer_in_events(
    scope: Scope, send: Send, dialect: Dialect, request: Request, session: Session, keep_alive_s: float
) -> None:
    """Raises CallRefused before anything was sent."""
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
        answering.cancel()  # of no effect once it is done
    if not has_begun:
        answer = answering.result()
        data = b"".join(request.events(answer))
        headers: Headers = [*EVENTS, (dialect.request_id, answer.id.encode())]
        await _delivered(scope, session, answer, send_whole(send, 200, data, headers))
        return
    try:
        answer = answering.result()
    except CallRefused as refused:
        await send({"type": "http.response.body", "body": b"".join(dialect.error_events(refused))})
        return
    last = send({"type": "http.response.body", "body": b"".join(request.events(answer))})
    await _delivered(scope, session, answer, last)


async def refuse(scope: Scope, send: Send, dialect: Dialect, refused: CallRefused, headers: Headers = ()) -> None:
    body = orjson.dumps(dialect.error(refused))
    await send_whole(send, refused.status, body, [JSON, DO_NOT_RETRY, *headers])


async def _answered(session: Session, request: Request) -> Answer:
    try:
        return await session.answer(request.call)
    except CallRefused:
        raise
    except Exception as error:  # an engine's or a renderer's: the agent gets an answer, we the trace
        console.warn(f"a call of session {session.name!r} failed:\n{traceback.format_exc()}")
        raise CallRefused(
            f"the call failed: {type(error).__name__}; the run's output has more.", status=500, code="call_failed"
        ) from error


_watching: set[asyncio.Task[None]] = set()


async def _delivered(scope: Scope, session: Session, answer: Answer, sending: Awaitable[None]) -> None:
    """Send it, and say to the session when it did not reach the client: a retry will come for it. Of a connection that we
    close behind the answer, as the client wanted, nothing more is known than that the client was there."""
    connection: Connection | None = scope.get(SCOPE_KEY)
    was_gone = connection is not None and connection.is_gone
    is_kept = connection is not None and connection.keeps_alive
    await sending
    if was_gone:
        session.not_delivered(answer.id)
    elif connection is not None and is_kept and not connection.has_all():
        _watch(connection, session, answer)


def _watch(connection: Connection, session: Session, answer: Answer) -> None:
    async def look() -> None:
        if not await connection.arrived(ARRIVES_S):
            session.not_delivered(answer.id)

    task = asyncio.create_task(look())
    _watching.add(task)
    task.add_done_callback(_watching.discard)

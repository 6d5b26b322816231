"""The ASGI application: it finds the session and the call of a request.

A session is found by its path and key (`/s/<session>/v1/...`) or only by its key (`/v1/...`). Plain ASGI, because a framework
would take most of a call's time here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson
from starlette.types import Receive, Scope, Send

from atropos_agent_api.calls import CallRefused
from atropos_agent_api.dialects.chat import Chat
from atropos_agent_api.dialects.completions import Completions
from atropos_agent_api.dialects.dialect import Dialect
from atropos_agent_api.dialects.messages import Messages
from atropos_agent_api.dialects.responses import Responses
from atropos_agent_api.server.answering import JSON, answer_in_events, answer_whole, refuse
from atropos_agent_api.server.episodes import EPISODES, Episodes
from atropos_agent_api.server.hints import hints_of
from atropos_agent_api.server.requests import key_of, only, read
from atropos_agent_api.sessions.session import Session
from atropos_agent_api.sessions.sessions import Sessions
from atropos_core.errors import AtroposError
from atropos_http_server.answers import Headers, header, send_whole

KEEP_ALIVE_S = 10.0  # between two comments while an answer is sampled
CHAT, MESSAGES = Chat(), Messages()
CALLS: Mapping[str, Dialect] = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": Completions(),
    "/v1/responses": Responses(),
    "/v1/messages": MESSAGES,
}
COUNT = "/v1/messages/count_tokens"
MODELS = "/v1/models"


class AgentApi:
    """`model` is the name that /v1/models returns; an agent may use any. `episodes`: for programs that take them."""

    def __init__(
        self,
        sessions: Sessions,
        model: str,
        *,
        keep_alive_s: float = KEEP_ALIVE_S,
        episodes: Episodes | None = None,
    ) -> None:
        self._sessions = sessions
        self._model = model
        self._keep_alive_s = keep_alive_s
        self._episodes = episodes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        id, path = _split(scope["path"])
        dialect = CALLS.get(path)
        try:
            if scope["path"] == "/health" and scope["method"] in ("GET", "HEAD"):
                await send_whole(send, 200, b'{"status":"ok"}', [JSON])
            elif self._episodes is not None and scope["path"].startswith(EPISODES):
                await self._episodes(scope, receive, send)
            elif path == MODELS or path.startswith(f"{MODELS}/"):
                only(scope, "GET")
                self._session(scope, id)
                await send_whole(send, 200, orjson.dumps(self._models(path)), [JSON])
            elif path == COUNT:
                only(scope, "POST")
                session = self._session(scope, id)
                session.arrived()
                hints = hints_of(scope["headers"])
                call = await read(scope, receive, lambda value: MESSAGES.call_of(value, hints))
                counted = orjson.dumps({"input_tokens": await session.count(call)})
                await send_whole(send, 200, counted, [JSON])
            elif dialect is None:
                raise CallRefused(
                    f"no call has the address {path[:100]!r}. Use {', '.join([*CALLS, COUNT, MODELS])}, each also after /s/<session>.",
                    status=404,
                    code="unknown_url",
                )
            else:
                only(scope, "POST")
                session = self._session(scope, id)
                await self._call(scope, receive, send, dialect, session)
        except CallRefused as refused:
            await refuse(scope, send, dialect or _dialect_of(scope), refused)

    async def _call(self, scope: Scope, receive: Receive, send: Send, dialect: Dialect, session: Session) -> None:
        session.arrived()
        hints = hints_of(scope["headers"])
        request = await read(scope, receive, lambda value: dialect.read(value, hints))
        if request.streams:
            await answer_in_events(scope, send, dialect, request, session, self._keep_alive_s)
        else:
            await answer_whole(scope, send, dialect, request, session)

    def _session(self, scope: Scope, id: str | None) -> Session:
        return self._sessions.find(id, key_of(scope))

    def _models(self, path: str) -> dict[str, Any]:
        """The list of models, in OpenAI's form and Anthropic's at once."""
        model = {
            "id": self._model, "object": "model", "created": 0, "owned_by": "atropos",
            "type": "model", "display_name": self._model, "created_at": "1970-01-01T00:00:00Z",
        }  # fmt: skip
        if path != MODELS:
            return {**model, "id": path.removeprefix(f"{MODELS}/")[:256]}
        return {"object": "list", "data": [model], "has_more": False, "first_id": self._model, "last_id": self._model}


async def refuse_early(scope: Scope, send: Send, status: int, error: AtroposError, headers: Headers = ()) -> None:
    """A `Refuse`: answer a request that is refused before the application is called, in the form of the API that it used."""
    refused = CallRefused(str(error), status=status, code=type(error).__name__)
    dialect = CALLS.get(_split(scope["path"])[1]) or _dialect_of(scope)
    body = orjson.dumps(dialect.error(refused))
    await send_whole(send, status, body, [JSON, *headers])


def _split(path: str) -> tuple[str | None, str]:
    """The session in an address, and the path after it."""
    if not path.startswith("/s/"):
        return None, path
    id, slash, rest = path[3:].partition("/")
    return id, slash + rest


def _dialect_of(scope: Scope) -> Dialect:
    """The dialect in which to write an error if the address is not that of a call."""
    is_anthropic = scope["path"].endswith(COUNT) or header(scope, b"anthropic-version") is not None
    return MESSAGES if is_anthropic else CHAT

"""The API over a real socket, with real sessions over an engine that says what a test wants."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import anthropic
import httpx
import openai

from atropos_agent_api.server.running import open_agent_server
from atropos_agent_api.sessions.options import SessionOptions
from atropos_agent_api.sessions.session import Session
from atropos_agent_api.sessions.sessions import Sessions
from atropos_agent_api.tokens.formats import TemplateFormat
from atropos_core.rollouts.tokenizer import ChatTokenizer
from atropos_http_server.server import RunningServer
from plugins.agent_api.tests.ledger_engine import LedgerEngine, policy_of

Says = Callable[[str, int], str]


class Api:
    """A server with one session, and the clients of its SDKs."""

    def __init__(self, server: RunningServer, sessions: Sessions, session: Session, engine: LedgerEngine) -> None:
        self.url = server.url
        self.server, self.sessions, self.session, self.engine = server, sessions, session, engine
        self.base = f"{server.url}/s/{session.id}"
        self.http = httpx.AsyncClient(
            base_url=self.base, headers={"authorization": f"Bearer {session.key}"}, timeout=30
        )
        self.anthropic = anthropic.AsyncAnthropic(base_url=self.base, api_key=session.key, timeout=30)
        self.openai = openai.AsyncOpenAI(base_url=f"{self.base}/v1", api_key=session.key, timeout=30)

    async def post(self, path: str, body: Any, **more: Any) -> httpx.Response:
        if isinstance(body, bytes):
            return await self.http.post(path, content=body, **more)
        return await self.http.post(path, json=body, **more)


@asynccontextmanager
async def api_of(tokenizer: ChatTokenizer, says: Says, *, server: Any = None, **options: Any) -> AsyncIterator[Api]:
    engine = LedgerEngine(tokenizer, says)
    policy = policy_of(engine, tokenizer)
    sessions = Sessions()
    format = TemplateFormat(policy, tokenizer)
    session = sessions.open(policy, format, SessionOptions(**options), seed=3, name="test")
    running = await open_agent_server(sessions, "policy", **(server or {}))
    api = Api(running, sessions, session, engine)
    try:
        yield api
    finally:
        await api.http.aclose()
        await api.openai.close()
        await api.anthropic.close()
        await running.close()

"""The server for environments that have their own client: a session for each of their episodes."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

from atropos_agent_api.server.running import MODEL, open_agent_server
from atropos_agent_api.sessions.options import SessionOptions
from atropos_agent_api.sessions.session import Session
from atropos_agent_api.sessions.sessions import Sessions
from atropos_agent_api.tokens.model_formats import ModelFormats
from atropos_core.conversation import Policy
from atropos_core.errors import AtroposError
from atropos_core.models.model_size import context_tokens
from atropos_core.types import Episode
from atropos_http_server.server import RunningServer


class ServedSession:
    """A `PolicySession`."""

    def __init__(self, session: Session, sessions: Sessions, server: RunningServer) -> None:
        self.url, self.key = f"{server.url}/s/{session.id}/v1", session.key
        self.turns: Sequence[tuple[int, int]] = ()
        self._session = session
        self._sessions = sessions

    @property
    def failure(self) -> AtroposError | None:
        return self._session.failure

    def end(self) -> Episode | None:
        self._sessions.end(self._session, "its episode has ended")
        record = self._session.record()
        self.turns = record.account.turns
        if not record.rollouts:
            return None
        return Episode(
            rollouts=record.rollouts,
            score=0.0,
            metrics=record.metrics,
            messages=record.messages,
            finish=record.finish,
        )


class ServedPolicies:
    """A `PolicyServer`."""

    def __init__(self, server: RunningServer, sessions: Sessions, formats: ModelFormats, context: int) -> None:
        """`context`: the most tokens of a prompt and its reply together; 0 if unknown."""
        self._server = server
        self._sessions = sessions
        self._formats = formats
        self._options = SessionOptions(context_tokens=context)

    async def session(self, policy: Policy, *, seed: int, name: str) -> ServedSession:
        format = await self._formats.of(policy)
        session = self._sessions.open(policy, format, self._options, seed=seed, name=name)
        return ServedSession(session, self._sessions, self._server)

    async def close(self) -> None:
        await self._server.close()


async def serve_policies(model: Path, today: str = "") -> ServedPolicies:
    """A `ServePolicies`."""
    formats, sessions = await asyncio.to_thread(ModelFormats, model, "auto", today), Sessions()
    return ServedPolicies(await open_agent_server(sessions, MODEL), sessions, formats, context_tokens(model))

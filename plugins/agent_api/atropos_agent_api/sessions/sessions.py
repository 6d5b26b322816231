"""The sessions of a server, found by path and key, which cannot be guessed."""

from __future__ import annotations

from hmac import compare_digest
from typing import TypeVar

from atropos_agent_api.calls import SESSION_ENDED, CallRefused
from atropos_agent_api.sessions.options import SessionOptions
from atropos_agent_api.sessions.session import Session
from atropos_agent_api.tokens.formats import ChatFormat
from atropos_core.conversation import Policy

KEY = "Use the key and the URL with which this agent was started."
MOST_ENDED = 10_000  # latest ended sessions whose calls are answered with 409; older ones get 404


S = TypeVar("S", bound=Session)


class Sessions:
    """Used on one event loop."""

    def __init__(self) -> None:
        self._open: dict[str, Session] = {}
        self._by_key: dict[str, str] = {}
        self._ended: dict[str, tuple[str, str]] = {}  # id: key and reason, in the order in which they ended

    def open(self, policy: Policy, format: ChatFormat, options: SessionOptions, *, seed: int, name: str) -> Session:
        return self.add(Session(policy, format, options, seed=seed, name=name))

    def add(self, session: S) -> S:
        """Make the session available to calls."""
        self._open[session.id] = session
        self._by_key[session.key] = session.id
        return session

    def find(self, id: str | None, key: str) -> Session:
        """Find a session by path and key, or only by key. Raises CallRefused: 401 for the wrong key, 404 for an unknown session,
        409 for one that has ended."""
        known = id if id is not None else self._by_key.get(key)
        if known is None:
            raise CallRefused(f"the key belongs to no session. {KEY}", status=401, code="invalid_api_key")
        if (session := self._open.get(known)) is not None:
            if not compare_digest(session.key.encode(), key.encode()):
                raise CallRefused(f"the key is not this session's. {KEY}", status=401, code="invalid_api_key")
            return session
        if known not in self._ended:
            raise CallRefused(f"this session does not exist. {KEY}", status=404, code="no_such_session")
        owner, why = self._ended[known]
        if not compare_digest(owner.encode(), key.encode()):
            raise CallRefused(f"the key is not this session's. {KEY}", status=401, code="invalid_api_key")
        raise CallRefused(f"this session has ended: {why}. {SESSION_ENDED}", status=409, code="session_ended")

    def end(self, session: Session, reason: str) -> None:
        """May be called twice."""
        session.end(reason)
        if self._open.pop(session.id, None) is None:
            return
        self._ended[session.id] = (session.key, session.ended)
        while len(self._ended) > MOST_ENDED:
            oldest = next(iter(self._ended))
            self._by_key.pop(self._ended.pop(oldest)[0], None)

    def __len__(self) -> int:
        return len(self._open)

"""Sessions: what a client opens first. Each is a file, so that it outlives the server."""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from atropos_core.errors import HubFull
from atropos_tinker_api.refused import Refused, unknown
from atropos_tinker_api.state.directory import read_json, write_json

MOST_SESSIONS = 100_000


@dataclass(frozen=True)
class Session:
    """One session. `finished` is the reason that the client gave, None while it is open."""

    id: str
    created: float
    tags: tuple[str, ...] = ()
    user_metadata: Mapping[str, Any] | None = None
    display_name: str | None = None
    finished: Mapping[str, Any] | None = None


class Sessions:
    """All sessions of the server."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        found = (read_json(path) for path in directory.glob("*.json"))
        self._sessions = {one["id"]: Session(**{**one, "tags": tuple(one["tags"])}) for one in found}
        self._heard = dict.fromkeys(self._sessions, time.monotonic())

    def create(
        self, tags: tuple[str, ...], user_metadata: Mapping[str, Any] | None, display_name: str | None
    ) -> Session:
        """Raises HubFull."""
        if len(self._sessions) >= MOST_SESSIONS:
            raise HubFull(f"there are {MOST_SESSIONS:,} sessions.", remedy="Serve from a new directory: --dir.")
        session = Session(secrets.token_hex(8), time.time(), tags, user_metadata, display_name)
        self._write(session)
        return session

    def find(self, id: str) -> Session:
        """Raises Refused."""
        if id not in self._sessions:
            raise unknown("session", id)
        return self._sessions[id]

    def open(self, id: str) -> Session:
        """Return a session that is not finished. Raises Refused."""
        session = self.find(id)
        if session.finished is not None:
            raise Refused(f"session {id} is finished: create a new one.", status=410)
        self._heard[id] = time.monotonic()
        return session

    def over(self, silent_s: float) -> set[str]:
        """Return the sessions that are finished, or whose clients have sent nothing for so long; since a restart, if that was later."""
        since = time.monotonic() - silent_s
        return {one.id for one in self._sessions.values() if one.finished is not None or self._heard[one.id] < since}

    def finish(self, id: str, reason: Mapping[str, Any]) -> None:
        """The first reason stays. Raises Refused."""
        session = self.find(id)
        if session.finished is None:
            self._write(replace(session, finished=reason))

    def newest_first(self) -> list[Session]:
        return sorted(self._sessions.values(), key=lambda one: (one.created, one.id), reverse=True)

    def _write(self, session: Session) -> None:
        write_json(self._directory / f"{session.id}.json", asdict(session))
        self._sessions[session.id] = session
        self._heard.setdefault(session.id, time.monotonic())

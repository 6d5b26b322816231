"""How the trainer gets its groups over a connection that may lose any answer."""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass
from typing import Any

from atropos_core.errors import DeadlineExceeded
from atropos_core.hub.records import BatchSize, GroupRecord
from atropos_core.hub.session import Session
from atropos_core.types import ScoredGroup

KEPT = 10_000  # notices for a trainer that does not lease


@dataclass(frozen=True)
class Answer:
    """The answer to a lease: groups, and the fate of draws that will bring none."""

    entries: list[GroupRecord[bytes]]
    failed: list[ScoredGroup]
    dropped: list[dict[str, Any]]  # draw, cause
    posted: int  # the number of its last notice
    commit_due: bool
    why: str | None


class Outbox:
    """Notices of draws that will bring no group: kept until the trainer confirms them."""

    def __init__(self) -> None:
        self.news = asyncio.Event()
        self._items: deque[tuple[int, ScoredGroup | dict[str, Any]]] = deque(maxlen=KEPT)
        self._posted = 0

    def __len__(self) -> int:
        return len(self._items)

    def post(self, item: ScoredGroup | dict[str, Any]) -> None:
        """Add a group whose rollouts failed, or a draw whose group was dropped."""
        self._posted += 1
        self._items.append((self._posted, item))
        self.news.set()

    def arrived(self, seen: int) -> None:
        while self._items and self._items[0][0] <= seen:
            self._items.popleft()

    def read(self) -> tuple[list[ScoredGroup], list[dict[str, Any]], int]:
        items = [item for _, item in self._items]
        failed = [item for item in items if isinstance(item, ScoredGroup)]
        return failed, [item for item in items if isinstance(item, dict)], self._posted

    def clear(self) -> None:
        self._items.clear()


class Leasing:
    """One call at a time: a newer call means that the client no longer waits for the older one."""

    def __init__(self, outbox: Outbox) -> None:
        self._outbox = outbox
        self._waiting: asyncio.Task[list[GroupRecord[bytes]]] | None = None

    def stop(self) -> None:
        if self._waiting is not None:
            self._waiting.cancel()

    async def lease(
        self, session: Session[bytes], want: BatchSize, version: int, wait_s: float, holding: set[int]
    ) -> tuple[list[GroupRecord[bytes]], str | None]:
        """A batch; or, no later than a notice arrives, no batch and the reason. What the session has leased beyond `holding` is
        returned first, because the trainer never received it."""
        if self._waiting is not None:
            self.stop()
            await asyncio.wait([self._waiting])
        lost = [number for number, state in session.holds.items() if state == "leased" and number not in holding]
        if lost:
            session.give_back(lost)
        entries = session.try_lease(want, version)
        if entries is not None or self._outbox:
            return entries or [], None
        waiting = self._waiting = asyncio.ensure_future(session.lease(want, version, wait_s))
        self._outbox.news.clear()
        news = asyncio.ensure_future(self._outbox.news.wait())
        try:
            await asyncio.wait({waiting, news}, return_when=asyncio.FIRST_COMPLETED)
            if not waiting.done():
                return [], None
            return waiting.result(), None
        except DeadlineExceeded as error:
            return [], Exception.__str__(error)
        except asyncio.CancelledError:
            if not waiting.cancelled():
                raise  # this call itself was cancelled
            return [], "the wait was ended: the server stops, or a newer call took its place"
        finally:
            waiting.cancel()
            news.cancel()
            if self._waiting is waiting:
                self._waiting = None

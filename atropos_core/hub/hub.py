"""The hub: scored groups between rollouts and the trainer.

Bounded, first in first out within an environment, fair between environments, leased, aware of policy versions. The life of a
group: `put` (waits while the hub is full); `lease`; then `give_back`, or `trained` (its update is in the trainer's memory);
and `commit` once a durable checkpoint holds the update, after which it is never served again.

One session at a time leases. A session ends when another one is opened, or when it is silent for `lease_s`; then everything that
it has not committed waits again. With a store, all of this outlives the process. Group ids and session numbers are local to one
hub. Without a store they start again in the next process.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from typing import TypeVar

from atropos_core.errors import LeaseLost
from atropos_core.hub.ledger import RESUME, Ledger
from atropos_core.hub.records import GroupRecord, Label, Limits, Store
from atropos_core.hub.session import Session

T = TypeVar("T")


class Hub(Ledger[T]):
    """Adds the waiting to the ledger: `put` waits for room, and a session ends after `lease_s` of silence."""

    def __init__(
        self,
        limits: Limits,
        *,
        max_staleness: int | None,
        on_dropped: Callable[[GroupRecord[T], str], None],
        store: Store[T] | None = None,
        lease_s: float | None = None,
        allocation_grace_s: float = 30.0,
        keep_trained: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(limits, max_staleness, on_dropped, store, allocation_grace_s, keep_trained, clock)
        self.lease_s = lease_s
        self._written = store and store.written
        self._puts: dict[str, asyncio.Future[int]] = {}  # those with a key that wait for room
        self._session: Session[T] | None = None
        if store:
            known = store.restored(clock())
            self.restore(known)
            if known.holder is not None:
                self._session = Session(self, known.session, known.holder, lease_s)

    async def put(self, payload: T, label: Label, *, key: str | None = None, deadline_s: float | None = None) -> int:
        """Put a group and return its id, once it is in the hub and written. A known key returns the earlier id and stores nothing.
        Raises HubFull at the deadline, StoreFull on a full disk, DataError for a group that can never fit, HubClosed."""
        taken = self.try_put(payload, label, key=key)
        if taken is None:
            taken = await self._put_later(payload, label, key, deadline_s)
        if self._written:
            await self._written()
        return taken

    async def _put_later(self, payload: T, label: Label, key: str | None, deadline_s: float | None) -> int:
        """Put a group for which there is no room now. If another put with its key waits, wait for that one first."""
        loop = asyncio.get_running_loop()
        end = None if deadline_s is None else loop.time() + deadline_s
        while True:
            left = None if end is None else max(end - loop.time(), 0.0)
            twin = self._puts.get(key) if key is not None else None
            if twin is None:
                return await self._wait_for_room(payload, label, key, left)
            await asyncio.wait([twin], timeout=left)
            if not twin.done():
                raise self.full(label)
            if (taken := self.try_put(payload, label, key=key)) is not None:
                return taken

    async def _wait_for_room(self, payload: T, label: Label, key: str | None, timeout_s: float | None) -> int:
        put = self.wait_for_room(payload, label, key)
        if key is not None:
            self._puts[key] = put.answer
        try:
            await asyncio.wait([put.answer], timeout=timeout_s)
            if put.answer.done():
                return put.answer.result()
            raise self.full(label)
        finally:
            if key is not None:
                del self._puts[key]
            self.withdraw_put(put)

    @property
    def current(self) -> Session[T] | None:
        """The session that may lease now."""
        return None if self._session is None or self._session.ended else self._session

    def open(self, holder: str, committed: Iterable[int] = ()) -> Session[T]:
        """Open a new session and end the one before. Of the groups that it leased and trained, those in `committed` (which are in
        the opener's checkpoint) are settled, and the others wait again."""
        self.open_session(holder, committed)
        number = self.newest_session
        if self.current:
            self.current.end(f"session {number} was opened by {holder!r}")
        self._session = Session(self, number, holder, self.lease_s)
        self.proceed()
        return self._session

    def session(self, number: int) -> Session[T]:
        """Return the session of that number. Raises LeaseLost if it has ended."""
        self.tick()
        if self.current is None or self.current.number != number:
            newest = self.newest_session
            cause = f"session {newest} was opened"
            if number == newest:
                cause = "it was silent for too long"
            elif number > newest:
                cause = f"it is none of this hub, which has opened {newest}"
            raise LeaseLost(f"session {number} is over: {cause}.", remedy=RESUME)
        return self.current

    def tick(self) -> None:
        """End the session if its lease ran out. Call this about once a second if there is a `lease_s`."""
        if self.current:
            self.current.expire()

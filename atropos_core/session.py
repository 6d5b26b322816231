"""The right of one trainer to lease from the hub, and what it may do with what it leased."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

from atropos_core import hub_report
from atropos_core.errors import DataError, DeadlineExceeded, LeaseLost
from atropos_core.held import Entry, Held, State, Want

if TYPE_CHECKING:
    from atropos_core.hub import Hub

T = TypeVar("T")
RESUME = "Resume the trainer from its last checkpoint: it opens a session of its own."


@dataclass(slots=True, eq=False)
class LeaseRequest(Generic[T]):
    """A lease that waits for its batch."""

    session: Session[T]
    want: Want
    version: int
    answer: asyncio.Future[list[Entry[T]]]


class Session(Generic[T]):
    """One trainer's right to lease. Every method raises LeaseLost once it is over: what it held may be another's."""

    def __init__(self, hub: Hub[T], number: int, holder: str, now: float) -> None:
        self.number = number
        self.holder = holder
        self.renewed = now
        self.ended: str | None = None  # why
        self._hub = hub

    def try_lease(self, want: Want, version: int) -> list[Entry[T]] | None:
        """A batch, or None where none can be formed now."""
        self.renew()
        if self._hub._requests:
            return None
        batch = self._hub._lease(want, version)
        if batch is not None or self._hub._offers:
            self._hub._proceed()
        return batch

    async def lease(self, want: Want, version: int, deadline_s: float) -> list[Entry[T]]:
        """The next groups, none with a token more than `max_staleness` versions behind `version`: all that is wanted
        or nothing. Raises DeadlineExceeded, which says why no batch could be formed; HubFull where none ever can."""
        self._hub._refuse_when_closed()
        if (batch := self.try_lease(want, version)) is not None:
            return batch
        hub, loop = self._hub, asyncio.get_running_loop()
        request = LeaseRequest(self, want, version, loop.create_future())
        hub._requests.append(request)
        end = loop.time() + deadline_s
        try:
            hub._proceed()
            while not request.answer.done():
                left = end - loop.time()
                if left <= 0:
                    raise DeadlineExceeded(
                        f"the hub got no batch of {want} within {deadline_s:g} s: {hub_report.why_no_batch(hub)}"
                    )
                await asyncio.wait([request.answer], timeout=min(left, max(hub._chooser.retry_s, 0.01)))
                if not request.answer.done():
                    hub.tick()
                    hub._proceed()
            return request.answer.result()
        except asyncio.CancelledError:
            if request.answer.done() and not request.answer.exception() and not self.ended:
                self.give_back([entry.id for entry in request.answer.result()])
            raise
        finally:
            if not request.answer.done():
                request.answer.cancel()
                hub._requests.remove(request)
                hub._proceed()

    def give_back(self, ids: Iterable[int]) -> None:
        """Undo a lease: the groups go back to where they stood. What already waits or is settled is passed over."""
        self.renew()
        some = [held for id in ids if (held := self._hub._out.get(id)) is not None]
        if trained := [held.id for held in some if held.state == "trained"]:
            raise DataError(f"groups {trained} are trained: they cannot be given back")
        self._mark(some, "waiting")
        for held in some:
            del self._hub._out[held.id]
        self._hub._return(some)
        self._hub._proceed()

    def trained(self, ids: Iterable[int]) -> None:
        """Their update is in the trainer's memory. Raises LeaseLost for a group that this session does not hold; what
        is trained or settled already is passed over, so that the call can be repeated."""
        self.renew()
        hub = self._hub
        some = []
        for id in ids:
            held = hub._held.get(id)
            if held is not None and held.state == "waiting":
                raise LeaseLost(f"group {id} is not leased to session {self.number}", remedy=RESUME)
            if held is not None and held.state == "leased":
                some.append(held)
        self._mark(some, "trained")
        for held in some:
            held.state = "trained"
            if hub._keep_trained:
                hub._count_trained(held, 1)
            else:
                hub._let_go.add(held.id)
                del hub._held[held.id], hub._out[held.id]
                hub._lanes.leave_room(held.label)
        hub._proceed()

    def commit(self, ids: Iterable[int] | None = None) -> int:
        """They are inside a durable checkpoint, without `ids` everything that was trained. Returns how many that
        settles now; what is settled already, or never was, is passed over."""
        self.renew()
        hub = self._hub
        if ids is None:
            ids = [*(id for id, held in hub._out.items() if held.state == "trained"), *hub._let_go]
        ids = list(dict.fromkeys(ids))
        settled = [held for id in ids if (held := hub._held.get(id)) is not None]
        gone = hub._let_go.intersection(ids)
        hub._settle(settled)
        hub._let_go -= gone
        hub._committed += len(gone)
        hub._proceed()
        return len(settled) + len(gone)

    def drop(self, ids: Iterable[int], cause: str) -> int:
        """They leave the hub though no trainer has seen them: counted and told under this cause, not as committed.
        Returns how many; what is settled already, or never was, is passed over."""
        self.renew()
        some = [held for id in dict.fromkeys(ids) if (held := self._hub._held.get(id)) is not None]
        self._hub._settle(some, cause)
        self._hub._proceed()
        return len(some)

    @property
    def holds(self) -> Mapping[int, str]:
        """The ids that are leased to it or trained by it, with which of the two."""
        self.renew()
        return {id: held.state for id, held in self._hub._out.items()} | dict.fromkeys(self._hub._let_go, "trained")

    @property
    def commit_due(self) -> bool:
        """More than half of the hub is taken by trained groups that no checkpoint holds: save one now, or the hub
        fills for good."""
        hub, limits = self._hub, self._hub.limits
        by_sequences = limits.sequences is not None and 2 * hub._trained_sequences > limits.sequences
        return 2 * hub._trained_bytes > limits.size_bytes or by_sequences

    def renew(self) -> None:
        """Every call renews; this one does nothing else."""
        self._hub.tick()
        if self.ended:
            raise self.lost()
        self.renewed = self._hub._clock()

    def close(self) -> None:
        """End it: what it leased and trained without a commit waits again. Twice is fine."""
        if not self.ended:
            self._hub._over(self, "it was closed")

    def lost(self) -> LeaseLost:
        return LeaseLost(f"session {self.number} of {self.holder!r} is over: {self.ended}.", remedy=RESUME)

    def _mark(self, some: Sequence[Held[T]], state: State) -> None:
        if some and self._hub._store:
            self._hub._store.mark([held.id for held in some], state)

"""A trainer's right to lease from the hub, and its operations on leased groups."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

from atropos_core.errors import DataError, DeadlineExceeded, LeaseLost
from atropos_core.hub import diagnostics
from atropos_core.hub.records import GroupRecord, State, Want

if TYPE_CHECKING:
    from atropos_core.hub.hub import Hub

T = TypeVar("T")
RESUME = "Resume the trainer from its last checkpoint, which opens a new session."


@dataclass(slots=True, eq=False)
class LeaseRequest(Generic[T]):
    """A lease that waits for its batch."""

    session: Session[T]
    want: Want
    version: int
    answer: asyncio.Future[list[GroupRecord[T]]]


class Session(Generic[T]):
    """One trainer's right to lease. Every method raises LeaseLost after its end: its groups may be leased by another session."""

    def __init__(self, hub: Hub[T], number: int, holder: str, now: float) -> None:
        self.number = number
        self.holder = holder
        self.renewed = now
        self.ended: str | None = None  # why
        self._hub = hub

    def try_lease(self, want: Want, version: int) -> list[GroupRecord[T]] | None:
        """Return a batch, or None if none can be formed now."""
        self.renew()
        if self._hub.ledger.requests:
            return None
        batch = self._hub.form_batch(want, version)
        if batch is not None or self._hub.ledger.offers:
            self._hub.proceed()
        return batch

    async def lease(self, want: Want, version: int, deadline_s: float) -> list[GroupRecord[T]]:
        """Return the next groups, none with a token more than `max_staleness` versions behind `version`: all that is wanted, or
        nothing. Raises DeadlineExceeded with the reason why no batch could be formed, and HubFull if none ever can."""
        self._hub.refuse_when_closed()
        if (batch := self.try_lease(want, version)) is not None:
            return batch
        hub, loop = self._hub, asyncio.get_running_loop()
        request = LeaseRequest(self, want, version, loop.create_future())
        hub.ledger.requests.append(request)
        end = loop.time() + deadline_s
        try:
            hub.proceed()
            while not request.answer.done():
                left = end - loop.time()
                if left <= 0:
                    raise DeadlineExceeded(
                        f"the hub got no batch of {want} within {deadline_s:g} s: {diagnostics.why_no_batch(hub.ledger)}"
                    )
                await asyncio.wait([request.answer], timeout=min(left, max(hub.ledger.selector.retry_s, 0.01)))
                if not request.answer.done():
                    hub.tick()
                    hub.proceed()
            return request.answer.result()
        except asyncio.CancelledError:
            if request.answer.done() and not request.answer.exception() and not self.ended:
                self.give_back([record.id for record in request.answer.result()])
            raise
        finally:
            if not request.answer.done():
                request.answer.cancel()
                hub.ledger.requests.remove(request)
                hub.proceed()

    def give_back(self, ids: Iterable[int]) -> None:
        """Undo a lease: the groups return to their positions. Groups that already wait or are settled are skipped."""
        self.renew()
        some = [record for id in ids if (record := self._hub.ledger.out.get(id)) is not None]
        if trained := [record.id for record in some if record.state == "trained"]:
            raise DataError(f"groups {trained} are trained: they cannot be given back")
        self._mark(some, "waiting")
        for record in some:
            del self._hub.ledger.out[record.id]
        self._hub.take_back(some)
        self._hub.proceed()

    def trained(self, ids: Iterable[int]) -> None:
        """Mark groups whose update is in the trainer's memory. Raises LeaseLost for a group that this session has not leased. Groups
        that are trained or settled are skipped, so that the call can be repeated."""
        self.renew()
        hub = self._hub
        some = []
        for id in ids:
            record = hub.ledger.records.get(id)
            if record is not None and record.state == "waiting":
                raise LeaseLost(f"group {id} is not leased to session {self.number}", remedy=RESUME)
            if record is not None and record.state == "leased":
                some.append(record)
        self._mark(some, "trained")
        for record in some:
            record.state = "trained"
            if hub.ledger.keep_trained:
                hub.ledger.count_trained(record, 1)
            else:
                hub.ledger.let_go.add(record.id)
                del hub.ledger.records[record.id], hub.ledger.out[record.id]
                hub.ledger.queues.leave_room(record.label)
        hub.proceed()

    def commit(self, ids: Iterable[int] | None = None) -> int:
        """Settle groups that are in a durable checkpoint; without `ids`, all trained ones. Returns how many are settled now. Groups
        that are settled already, or unknown, are skipped."""
        self.renew()
        hub = self._hub
        if ids is None:
            ids = [*(id for id, record in hub.ledger.out.items() if record.state == "trained"), *hub.ledger.let_go]
        ids = list(dict.fromkeys(ids))
        settled = [record for id in ids if (record := hub.ledger.records.get(id)) is not None]
        gone = hub.ledger.let_go.intersection(ids)
        hub.settle(settled)
        hub.ledger.let_go -= gone
        hub.ledger.committed += len(gone)
        hub.proceed()
        return len(settled) + len(gone)

    def drop(self, ids: Iterable[int], cause: str) -> int:
        """Remove groups that no trainer has seen. They are counted and reported under this cause, not as committed. Returns how
        many. Groups that are settled already, or unknown, are skipped."""
        self.renew()
        some = [record for id in dict.fromkeys(ids) if (record := self._hub.ledger.records.get(id)) is not None]
        self._hub.settle(some, cause)
        self._hub.proceed()
        return len(some)

    @property
    def holds(self) -> Mapping[int, str]:
        """Return the ids that it has leased or trained, with which of the two."""
        self.renew()
        return {id: record.state for id, record in self._hub.ledger.out.items()} | dict.fromkeys(
            self._hub.ledger.let_go, "trained"
        )

    @property
    def commit_due(self) -> bool:
        """True if trained groups without a checkpoint take more than half of the hub: save one now, or the hub fills for good."""
        hub, limits = self._hub, self._hub.ledger.limits
        by_sequences = limits.sequences is not None and 2 * hub.ledger.trained_sequences > limits.sequences
        return 2 * hub.ledger.trained_bytes > limits.size_bytes or by_sequences

    def renew(self) -> None:
        """Renew the session. Every call does; this one does nothing else."""
        self._hub.tick()
        if self.ended:
            raise self.lost()
        self.renewed = self._hub.ledger.clock()

    def close(self) -> None:
        """End the session: what it leased or trained without a commit waits again. May be called twice."""
        if not self.ended:
            self._hub.end_session(self, "it was closed")

    def lost(self) -> LeaseLost:
        return LeaseLost(f"session {self.number} of {self.holder!r} is over: {self.ended}.", remedy=RESUME)

    def _mark(self, some: Sequence[GroupRecord[T]], state: State) -> None:
        if some and self._hub.ledger.store:
            self._hub.ledger.store.mark([record.id for record in some], state)

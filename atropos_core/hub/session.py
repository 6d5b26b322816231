"""A trainer's right to lease from the hub, and its operations on leased groups."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from typing import Generic, TypeVar

from atropos_core.errors import DeadlineExceeded, LeaseLost
from atropos_core.hub.ledger import RESUME, Ledger
from atropos_core.hub.records import BatchSize, GroupRecord

T = TypeVar("T")


class Session(Generic[T]):
    """One trainer's right to lease. Every method raises LeaseLost after its end: its groups may be leased by another session."""

    def __init__(self, ledger: Ledger[T], number: int, holder: str, lease_s: float | None) -> None:
        self.number = number
        self.holder = holder
        self.ended: str | None = None  # why
        self._ledger = ledger
        self._lease_s = lease_s
        self._renewed = ledger.clock()

    def try_lease(self, size: BatchSize, version: int) -> list[GroupRecord[T]] | None:
        """Return a batch, or None if none can be formed now."""
        self.renew()
        return self._ledger.lease(size, version)

    async def lease(self, size: BatchSize, version: int, deadline_s: float) -> list[GroupRecord[T]]:
        """Return the next groups, none with a token more than `max_staleness` versions behind `version`: a whole batch, or
        nothing. Raises DeadlineExceeded with the reason why no batch could be formed, and HubFull if none ever can."""
        ledger, loop = self._ledger, asyncio.get_running_loop()
        ledger.refuse_when_closed()
        if (batch := self.try_lease(size, version)) is not None:
            return batch
        request = ledger.wait_for_batch(size, version)
        end = loop.time() + deadline_s
        try:
            ledger.proceed()
            while not request.answer.done():
                left = end - loop.time()
                if left <= 0:
                    raise DeadlineExceeded(
                        f"the hub got no batch of {size} within {deadline_s:g} s: {ledger.why_no_batch()}"
                    )
                await asyncio.wait([request.answer], timeout=min(left, ledger.retry_s))
                if not request.answer.done():
                    self.expire()
                    ledger.proceed()
            return request.answer.result()
        except asyncio.CancelledError:
            if request.answer.done() and not request.answer.exception() and not self.ended:
                self.give_back([record.id for record in request.answer.result()])
            raise
        finally:
            ledger.withdraw_lease(request)

    def give_back(self, ids: Iterable[int]) -> None:
        """Undo a lease: the groups return to their positions. Groups that already wait or are settled are skipped."""
        self.renew()
        self._ledger.take_back(ids)

    def trained(self, ids: Iterable[int]) -> None:
        """Mark groups whose update is in the trainer's memory. Raises LeaseLost for a group that this session has not leased. Groups
        that are trained or settled are skipped, so that the call can be repeated."""
        self.renew()
        self._ledger.train(ids)

    def commit(self, ids: Iterable[int] | None = None) -> int:
        """Settle groups that are in a durable checkpoint; without `ids`, all trained ones. Returns how many are settled now. Groups
        that are settled already, or unknown, are skipped."""
        self.renew()
        return self._ledger.commit(ids)

    def drop(self, ids: Iterable[int], cause: str) -> int:
        """Remove groups that no trainer has seen. They are counted and reported under this cause, not as committed. Returns how
        many. Groups that are settled already, or unknown, are skipped."""
        self.renew()
        return self._ledger.drop(ids, cause)

    @property
    def holds(self) -> Mapping[int, str]:
        """Return the ids that it has leased or trained, with which of the two."""
        self.renew()
        return self._ledger.taken()

    @property
    def commit_due(self) -> bool:
        """True if trained groups without a checkpoint take more than half of the hub: save one now, or the hub fills for good."""
        return self._ledger.commit_due

    def renew(self) -> None:
        """Renew the session. Every call does; this one does nothing else."""
        self.expire()
        if self.ended:
            raise self.lost()
        self._renewed = self._ledger.clock()

    def expire(self) -> None:
        """End the session if it was silent for too long."""
        if not self.ended and self._lease_s is not None and self._ledger.clock() - self._renewed > self._lease_s:
            self._ledger.close_session()
            self.end(f"it was not renewed for {self._lease_s:g} s")

    def close(self) -> None:
        """End the session: what it leased or trained without a commit waits again. May be called twice."""
        if not self.ended:
            self._ledger.close_session()
            self.end("it was closed")

    def end(self, cause: str) -> None:
        """End the session without telling the store, which has just been told."""
        self.ended = cause
        self._ledger.end_session(self.lost())

    def lost(self) -> LeaseLost:
        return LeaseLost(f"session {self.number} of {self.holder!r} is over: {self.ended}.", remedy=RESUME)

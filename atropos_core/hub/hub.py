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
import heapq
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from hashlib import blake2b
from typing import Any, Generic, TypeVar, cast

from atropos_core.errors import DataError, HubClosed, LeaseLost, StoreFull
from atropos_core.hub import diagnostics
from atropos_core.hub.fair_queue import EnvironmentQueue, Offer
from atropos_core.hub.lease_session import RESUME, Session
from atropos_core.hub.ledger import Ledger
from atropos_core.hub.records import EnvironmentStatus, GroupRecord, HubStatus, Label, Limits, Store, Want

__all__ = ["EnvironmentStatus", "GroupRecord", "Hub", "HubStatus", "Label", "Limits", "Session", "Store", "Want"]

T = TypeVar("T")
KEYS = 100_000  # groups whose idempotency keys are remembered


class Hub(Generic[T]):
    """All decisions are synchronous; `put` and `lease` only add the waiting. `on_dropped` is called with each group that no trainer
    will see, and the cause: "stale", a session's reason for dropping it, or "damaged" on the disk, then with the payload None.
    Without `keep_trained`, a group is freed once it is trained. That is for a trainer that draws it again if it dies before the
    commit."""

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
        self.max_staleness = max_staleness
        self.lease_s = lease_s
        self.ledger: Ledger[T] = Ledger(limits, store, clock, allocation_grace_s, keep_trained)
        self.current: Session[T] | None = None  # the session that may lease now
        self._on_dropped = on_dropped
        self._keys: OrderedDict[bytes, int] = OrderedDict()
        self._next = self._sessions = 0
        self._offered: dict[bytes, asyncio.Future[int]] = {}  # those with a key
        self._closed = False
        if store:
            self._restore(store)

    def __len__(self) -> int:
        """The number of groups that wait to be leased."""
        return self.ledger.queues.waiting

    # -- environments

    def share(self, environment: str, *, weight: float = 1.0, minimum: float = 0.0) -> None:
        """Register an environment. `weight` is its part of the batches, relative to the other weights. `minimum` is the part of
        every batch (0 to 1) that is reserved for it while it has groups."""
        diagnostics.check_name(environment)
        if not (weight > 0 and 0 <= minimum <= 1):
            raise DataError(
                f"environment {environment!r} asks for weight {weight!r} and minimum {minimum!r} of the batches.",
                remedy="A weight is above 0, a minimum is a part from 0 to 1.",
            )
        self.ledger.queues.register(environment, weight, minimum, self.ledger.clock())
        self.proceed()

    def forget(self, environment: str) -> None:
        """Unregister an environment. The groups that it has sent stay."""
        self.ledger.queues.forget(environment)
        self.proceed()

    # -- in

    def knows(self, key: str) -> bool:
        """True if a group came under this key, among the last 100,000."""
        return _digest(key) in self._keys

    def labels(self) -> Iterator[tuple[int, Label]]:
        """Yield id and label of all groups in the hub."""
        return ((record.id, record.label) for record in self.ledger.records.values())

    def admits(self, label: Label) -> bool:
        """True if a put of this group would not have to wait now."""
        ledger = self.ledger
        queues = ledger.queues
        diagnostics.check_fits(ledger.limits, label)
        if not queues.fits(label):
            return False
        if ledger.starving:
            return True
        if ledger.offers:
            queue = queues.by_name.get(label.environment)
            if (queue is not None and queue.offers) or ledger.is_stuck():
                return False
        return queues.may_take(label)

    def try_put(self, payload: T, label: Label, *, key: str | None = None) -> int | None:
        """Put a group and return its id, or None if there is no room now. A known key returns the earlier id."""
        self.refuse_when_closed()
        digest = _digest(key)
        if digest is not None and digest in self._keys:
            return self._keys[digest]
        if not self.admits(label):
            return None
        taken = self._admit(payload, label, digest)
        if self.ledger.requests:
            self.proceed()
        return taken

    async def put(self, payload: T, label: Label, *, key: str | None = None, deadline_s: float | None = None) -> int:
        """Put a group and return its id, once it is in the hub and written. A known key returns the earlier id and stores nothing.
        Raises HubFull at the deadline, StoreFull on a full disk, DataError for a group that can never fit, HubClosed."""
        taken = self.try_put(payload, label, key=key)
        if taken is None:
            taken = await self._put_later(payload, label, key, deadline_s)
        if self.ledger.store:
            await self.ledger.store.written()
        return taken

    async def _put_later(self, payload: T, label: Label, key: str | None, deadline_s: float | None) -> int:
        """Put a group for which there is no room now."""
        digest, loop = _digest(key), asyncio.get_running_loop()
        end = None if deadline_s is None else loop.time() + deadline_s
        while True:
            left = None if end is None else max(end - loop.time(), 0.0)
            twin = self._offered.get(digest) if digest else None
            if twin is None:
                return await self._wait_for_room(payload, label, digest, left)
            await asyncio.wait([twin], timeout=left)
            if not twin.done():
                raise diagnostics.full(self.ledger, label)
            if (taken := self.try_put(payload, label, key=key)) is not None:
                return taken

    async def _wait_for_room(self, payload: T, label: Label, key: bytes | None, timeout_s: float | None) -> int:
        now = self.ledger.clock()
        queue = self.ledger.queues.queue(label.environment, now)
        queue.last_put, queue.silent = now, False
        offer = Offer(payload, label, key, asyncio.get_running_loop().create_future())
        queue.offers.append(offer)
        self.ledger.offers += 1
        if key:
            self._offered[key] = offer.answer
        if len(queue.offers) == 1:  # behind another nothing has become possible
            self.proceed()
        try:
            await asyncio.wait([offer.answer], timeout=timeout_s)
            if offer.answer.done():
                return offer.answer.result()
            raise diagnostics.full(self.ledger, label)
        finally:
            if key:
                del self._offered[key]
            if not offer.answer.done():
                offer.answer.cancel()
                queue.offers.remove(offer)
                self.ledger.offers -= 1
                self.ledger.queues.tidy(queue)
                self.proceed()

    def _admit(self, payload: T, label: Label, key: bytes | None) -> int:
        ledger = self.ledger
        if ledger.store:
            ledger.store.put(self._next, payload, label, key)
        now = ledger.clock()
        record = GroupRecord(self._next, payload, label, now)
        self._next += 1
        ledger.queues.take_room(label, now)
        queue = ledger.queues.enqueue(record)
        queue.last_put, queue.silent = now, False
        ledger.records[record.id] = record
        self._watch_version(record)
        if key is not None:
            self._keys[key] = record.id
            if len(self._keys) > KEYS:
                self._keys.popitem(last=False)
        return record.id

    def _admit_offers(self) -> bool:
        """Admit groups that wait for room. The environment that holds least of its share is first, and its oldest group is never
        skipped for being large."""
        admitted = False
        while self.ledger.offers:
            for queue in self.ledger.queues.offering():
                offer = queue.offers[0]
                if not (self.ledger.starving or self.ledger.queues.may_take(offer.label)):
                    continue
                if not self.ledger.queues.fits(offer.label):
                    return admitted
                self._let_in(queue, offer)
                admitted = True
                break
            else:
                return admitted
        return admitted

    def _let_in(self, queue: EnvironmentQueue[T], offer: Offer[T]) -> None:
        queue.offers.remove(offer)
        self.ledger.offers -= 1
        try:
            offer.answer.set_result(self._admit(offer.payload, offer.label, offer.key))
        except StoreFull as error:
            offer.answer.set_exception(error)

    def _let_past(self) -> bool:
        """If the next group does not fit, admit smaller ones until a batch can be formed. Otherwise the trainer would wait for
        groups, and the groups for room that only the trainer can free."""
        admitted = False
        if self.ledger.starving and self.ledger.is_stuck():
            for queue in self.ledger.queues.offering():
                for offer in list(queue.offers):
                    if self.ledger.starving and self.ledger.queues.fits(offer.label):
                        self._let_in(queue, offer)
                        admitted = True
        return admitted

    # -- out

    def open(self, holder: str, committed: Iterable[int] = ()) -> Session[T]:
        """Open a new session and end the one before. Of the groups that it leased and trained, those in `committed` (which are in
        the opener's checkpoint) are settled, and the others wait again."""
        self.refuse_when_closed()
        self.settle([record for id in committed if (record := self.ledger.records.get(id)) is not None])
        if self.ledger.store:
            self.ledger.store.session(self._sessions + 1, holder)
        self._end_session(f"session {self._sessions + 1} was opened by {holder!r}")
        self._sessions += 1
        self.current = Session(self, self._sessions, holder, self.ledger.clock())
        self.proceed()
        return self.current

    def session(self, number: int) -> Session[T]:
        """Return the session of that number. Raises LeaseLost if it has ended."""
        self.tick()
        if self.current is None or self.current.number != number:
            cause = f"session {self._sessions} was opened"
            if number == self._sessions:
                cause = "it was silent for too long"
            elif number > self._sessions:
                cause = f"it is none of this hub, which has opened {self._sessions}"
            raise LeaseLost(f"session {number} is over: {cause}.", remedy=RESUME)
        return self.current

    def tick(self) -> None:
        """End the session if its lease ran out. Call this about once a second if there is a `lease_s`."""
        current = self.current
        if current and self.lease_s is not None and self.ledger.clock() - current.renewed > self.lease_s:
            self.end_session(current, f"it was not renewed for {self.lease_s:g} s")

    def end_session(self, session: Session[T], cause: str) -> None:
        if self.ledger.store:
            self.ledger.store.session(session.number, None)
        self._end_session(cause)
        self.proceed()

    def _end_session(self, cause: str) -> None:
        """End the session without telling the store: on replay, what the session had leased waits again as well."""
        if self.current is None:
            return
        self.current.ended = cause
        self.current = None
        returned = list(self.ledger.out.values())
        self.ledger.out.clear()
        self.ledger.let_go.clear()
        self.ledger.trained_bytes = self.ledger.trained_sequences = self.ledger.trained_groups = 0
        self.ledger.unmet = None
        self.ledger.selector.done()
        self.take_back(returned)
        for request in [request for request in self.ledger.requests if request.session.ended]:
            self.ledger.requests.remove(request)
            if not request.answer.done():
                request.answer.set_exception(request.session.lost())

    def take_back(self, returned: list[GroupRecord[T]]) -> None:
        for record in returned:
            record.state = "waiting"
            self._watch_version(record)
        self.ledger.queues.requeue(returned)

    def settle(self, some: Sequence[GroupRecord[T]], cause: str | None = None) -> None:
        """Remove groups from the hub: committed, or dropped for a `cause`."""
        if not some:
            return
        dropped = [self.ledger.with_payload(record) for record in some] if cause is not None else []
        if self.ledger.store:
            self.ledger.store.settle([record.id for record in some], committed=cause is None)
        for record in some:
            del self.ledger.records[record.id]
            if record.state == "waiting":
                self.ledger.queues.dequeue(record, served=False)
            else:
                del self.ledger.out[record.id]
                if record.state == "trained":
                    self.ledger.count_trained(record, -1)
            self.ledger.queues.leave_room(record.label)
            if cause is None:
                self.ledger.committed += 1
            else:
                self.ledger.dropped[cause] += 1
        for record in dropped:
            self._on_dropped(record, cause or "")

    # -- batches

    def form_batch(self, want: Want, version: int) -> list[GroupRecord[T]] | None:
        """Return a batch, if one can be formed now."""
        self._drop_stale(version)
        self.ledger.unmet = want
        while self._admit_offers() | self._let_past():
            self._drop_stale(version)
        while (batch := self.ledger.selector.form(want, stuck=self.ledger.is_stuck())) is not None:
            batch.sort(key=lambda record: record.id)
            copies = [self.ledger.with_payload(record) for record in batch]
            torn = {record.id for record in copies if record.payload is None}
            if torn:
                self.settle([record for record in batch if record.id in torn], "damaged")
                continue
            if self.ledger.store:
                self.ledger.store.mark([record.id for record in batch], "leased")
            self.ledger.queues.mark_time()
            for record in batch:
                self.ledger.queues.dequeue(record, served=True)
                record.state = "leased"
                self.ledger.out[record.id] = record
                if self.ledger.store:
                    record.payload = cast(T, None)
            self.ledger.unmet = None
            self.ledger.selector.done()
            return copies
        return None

    def _watch_version(self, record: GroupRecord[T]) -> None:
        if self.max_staleness is not None and record.label.oldest_version is not None:
            heapq.heappush(self.ledger.by_version, (record.label.oldest_version, record.id))
        if len(self.ledger.by_version) > 2 * len(self.ledger.records) + 1000:  # most of them have left
            waiting = (one for one in self.ledger.records.values() if one.state == "waiting")
            self.ledger.by_version = [
                (one.label.oldest_version, one.id) for one in waiting if one.label.oldest_version is not None
            ]
            heapq.heapify(self.ledger.by_version)

    def _drop_stale(self, version: int) -> None:
        """Drop stale groups, also those that are admitted into the room of others."""
        if self.max_staleness is None:
            return
        while stale := self._take_stale(version - self.max_staleness):
            try:
                self.settle(stale, "stale")
            except StoreFull:
                for record in stale:
                    self._watch_version(record)
                raise
            self._admit_offers()

    def _take_stale(self, oldest: int) -> list[GroupRecord[T]]:
        stale: dict[int, GroupRecord[T]] = {}
        while self.ledger.by_version and self.ledger.by_version[0][0] < oldest:
            _, id = heapq.heappop(self.ledger.by_version)
            record = self.ledger.records.get(id)
            if record is not None and record.state == "waiting":
                stale[id] = record
        return list(stale.values())

    # -- progress

    def proceed(self) -> None:
        """Do everything that has become possible: puts that fit, leases that can be filled."""
        while self._admit_offers() | self._serve():
            pass
        if (
            self.ledger.requests
            and self.ledger.starving
            and self.ledger.is_stuck()
            and diagnostics.is_small(self.ledger)
        ):
            request = self.ledger.requests.popleft()
            self.ledger.unmet = None
            request.answer.set_exception(diagnostics.too_small(self.ledger, request.want))
            self.proceed()

    def _serve(self) -> bool:
        served = False
        while self.ledger.requests:
            request = self.ledger.requests[0]
            try:
                batch = self.form_batch(request.want, request.version)
            except StoreFull as error:
                self.ledger.requests.popleft()
                request.answer.set_exception(error)
                continue
            if batch is None:
                break
            self.ledger.requests.popleft()
            request.answer.set_result(batch)
            served = True
        return served

    def refuse_when_closed(self) -> None:
        if self._closed:
            raise HubClosed("the hub is closed: the run is ending")

    async def close(self) -> None:
        """Close the hub; may be called twice."""
        self.stop()

    def stop(self) -> None:
        """Wake every waiting caller with HubClosed. The hub's groups stay in the store, and can still be settled."""
        self._closed = True
        closed = HubClosed("the hub is closed: the run is ending")
        for queue in list(self.ledger.queues.by_name.values()):
            for offer in queue.offers:
                offer.answer.set_exception(closed)
            queue.offers.clear()
        self.ledger.offers = 0
        for request in self.ledger.requests:
            request.answer.set_exception(closed)
        self.ledger.requests.clear()

    # -- what is known

    def status(self) -> HubStatus:
        """Return the figures. Takes the same time for any number of groups."""
        return diagnostics.status(self.ledger)

    def state(self) -> Mapping[str, Any]:
        """Return the state for the checkpoint that `commit` follows, if the hub is in the run's own process."""
        committed = self.ledger.committed + self.ledger.trained_groups + len(self.ledger.let_go)
        return {"next": self._next, "committed": committed, "stale": self.ledger.dropped["stale"]}

    def load(self, state: Mapping[str, Any]) -> None:
        """Restore a state. Raises KeyError, TypeError, ValueError."""
        counts = [int(state[name]) for name in ("next", "committed", "stale")]
        self._next, self.ledger.committed, self.ledger.dropped["stale"] = counts

    def _restore(self, store: Store[T]) -> None:
        now = self.ledger.clock()
        known = store.restored(now)
        self._next, self.ledger.committed, self._sessions = known.next_id, known.committed, known.session
        self._keys.update(list(known.keys)[-KEYS:])
        for record in known.records:
            self.ledger.records[record.id] = record
            self.ledger.queues.take_room(record.label, now)
            if record.state == "waiting":
                self.ledger.queues.enqueue(record)
                self._watch_version(record)
            else:
                self.ledger.out[record.id] = record
                if record.state == "trained":
                    self.ledger.count_trained(record, 1)
        if known.holder is not None:
            self.current = Session(self, known.session, known.holder, now)


def _digest(key: str | None) -> bytes | None:
    return None if key is None else blake2b(key.encode(errors="surrogatepass"), digest_size=16).digest()

"""All groups of the hub with their states, and the puts and leases that wait. Every decision is made here, and none of them waits.

A verb writes the store first, then changes the state, then does what has become possible (`proceed`). If the store raises StoreFull,
nothing has changed.
"""

from __future__ import annotations

import asyncio
import heapq
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Any, Generic, TypeVar, cast

from atropos_core import console
from atropos_core.errors import DataError, HubClosed, HubFull, LeaseLost, StoreFull
from atropos_core.hub import reports
from atropos_core.hub.batch_selector import BatchSelector
from atropos_core.hub.fair_queue import EnvironmentQueues, PendingPut
from atropos_core.hub.records import BatchSize, GroupRecord, HubStatus, Label, Limits, Restored, State, Store

T = TypeVar("T")
KEYS = 100_000  # groups whose idempotency keys are remembered
RESUME = "Resume the trainer from its last checkpoint, which opens a new session."


@dataclass(slots=True, eq=False)
class PendingLease(Generic[T]):
    """A lease that waits for its batch."""

    size: BatchSize
    version: int
    answer: asyncio.Future[list[GroupRecord[T]]]


class Ledger(Generic[T]):
    """The hub without its waiting. `on_dropped` is called with each group that no trainer will see, and the cause: "stale", a
    session's reason for dropping it, or "damaged" on the disk, then with the payload None. Without `keep_trained`, a group is freed
    once it is trained. That is for a trainer that draws it again if it dies before the commit."""

    def __init__(
        self,
        limits: Limits,
        max_staleness: int | None,
        on_dropped: Callable[[GroupRecord[T], str], None],
        store: Store[T] | None,
        allocation_grace_s: float,
        keep_trained: bool,
        clock: Callable[[], float],
    ) -> None:
        self.max_staleness = max_staleness
        self.clock = clock
        self.newest_session = 0  # its number
        self._limits = limits
        self._on_dropped = on_dropped
        self._store = store
        self._keep_trained = keep_trained
        self._queues: EnvironmentQueues[T] = EnvironmentQueues(limits)
        self._selector = BatchSelector(self._queues, allocation_grace_s, clock)
        self._records: dict[int, GroupRecord[T]] = {}  # all that is in the hub, by id
        self._taken: dict[int, GroupRecord[T]] = {}  # leased or trained, by the newest session
        self._by_version: list[tuple[int, int]] = []  # heap of (oldest version, id) of what waits or waited
        self._freed: set[int] = set()  # trained, not committed, and no longer in the hub
        self._trained_bytes = self._trained_sequences = self._trained_groups = 0
        self._committed = 0
        self._dropped: Counter[str] = Counter()  # by cause
        self._leases: deque[PendingLease[T]] = deque()
        self._unmet: BatchSize | None = None  # the last batch that could not be formed
        self._keys: OrderedDict[bytes, int] = OrderedDict()
        self._next = 0  # id
        self._closed = False

    def __len__(self) -> int:
        """The number of groups that wait to be leased."""
        return self._queues.waiting

    # -- environments

    def share(self, environment: str, *, weight: float = 1.0, minimum: float = 0.0) -> None:
        """Register an environment. `weight` is its part of the batches, relative to the other weights. `minimum` is the part of
        every batch (0 to 1) that is reserved for it while it has groups."""
        reports.check_name(environment)
        if not (weight > 0 and 0 <= minimum <= 1):
            raise DataError(
                f"environment {environment!r} asks for weight {weight!r} and minimum {minimum!r} of the batches.",
                remedy="A weight is above 0, a minimum is a part from 0 to 1.",
            )
        self._queues.register(environment, weight, minimum, self.clock())
        self.proceed()

    def forget(self, environment: str) -> None:
        """Unregister an environment. The groups that it has sent stay."""
        self._queues.forget(environment)
        self.proceed()

    # -- admit

    def knows(self, key: str) -> bool:
        """True if a group came under this key, among the last 100,000."""
        return _digest(key) in self._keys

    def labels(self) -> Iterator[tuple[int, Label]]:
        """Yield id and label of all groups in the hub."""
        return ((record.id, record.label) for record in self._records.values())

    def admits(self, label: Label) -> bool:
        """True if a put of this group would not have to wait now."""
        reports.check_fits(self._limits, label)
        if not self._queues.fits(label):
            return False
        if self._is_starving:
            return True
        if self._queues.puts_waiting and (self._queues.is_stuck() or self._queues.is_pending(label.environment)):
            return False
        return self._queues.may_take(label)

    def try_put(self, payload: T, label: Label, *, key: str | None = None) -> int | None:
        """Put a group and return its id, or None if there is no room now. A known key returns the earlier id."""
        self.refuse_when_closed()
        digest = _digest(key)
        if digest is not None and digest in self._keys:
            return self._keys[digest]
        if not self.admits(label):
            return None
        taken = self._admit(payload, label, digest)
        if self._leases:
            self.proceed()
        return taken

    def wait_for_room(self, payload: T, label: Label, key: str | None) -> PendingPut[T]:
        """Return the put of a group that `try_put` had no room for. Its answer comes once the group is admitted."""
        put = PendingPut(payload, label, _digest(key), asyncio.get_running_loop().create_future())
        if self._queues.add_pending(put, self.clock()):
            self.proceed()
        return put

    def withdraw_put(self, put: PendingPut[T]) -> None:
        """End a put, whether it was answered or not."""
        if not put.answer.done():
            put.answer.cancel()
            self._queues.remove_pending(put)
            self._queues.tidy(put.label.environment)
            self.proceed()

    def full(self, label: Label) -> HubFull:
        """Return the error for a group that found no room in time."""
        return reports.full(self._queues, label)

    def _admit(self, payload: T, label: Label, key: bytes | None) -> int:
        if self._store:
            self._store.put(self._next, payload, label, key)
        now = self.clock()
        record = GroupRecord(self._next, payload, label, now)
        self._next += 1
        self._queues.take_room(label, now)
        queue = self._queues.enqueue(record)
        queue.last_put, queue.silent = now, False
        self._records[record.id] = record
        self._watch_version(record)
        if key is not None:
            self._keys[key] = record.id
            if len(self._keys) > KEYS:
                self._keys.popitem(last=False)
        return record.id

    def _admit_pending(self) -> bool:
        """Admit groups that wait for room. The environment that holds least of its share is first, and its oldest group is never
        skipped for being large."""
        admitted = False
        while self._queues.puts_waiting:
            for queue in self._queues.with_pending():
                put = queue.pending[0]
                if not (self._is_starving or self._queues.may_take(put.label)):
                    continue
                if not self._queues.fits(put.label):
                    return admitted
                self._answer(put)
                admitted = True
                break
            else:
                return admitted
        return admitted

    def _answer(self, put: PendingPut[T]) -> None:
        self._queues.remove_pending(put)
        try:
            put.answer.set_result(self._admit(put.payload, put.label, put.key))
        except StoreFull as error:
            put.answer.set_exception(error)

    def _admit_smaller(self) -> bool:
        """If the next group does not fit, admit smaller ones until a batch can be formed. Otherwise the trainer would wait for
        groups, and the groups for room that only the trainer can free."""
        admitted = False
        if self._is_starving and self._queues.is_stuck():
            for queue in self._queues.with_pending():
                for put in list(queue.pending):
                    if self._is_starving and self._queues.fits(put.label):
                        self._answer(put)
                        admitted = True
        return admitted

    @property
    def _is_starving(self) -> bool:
        """True if the last requested batch needs more than waits: now fairness must not keep anything out."""
        size, queues = self._unmet, self._queues
        if size is None:
            return False
        return (queues.waiting if size.groups else queues.waiting_sequences) < size.number

    # -- sessions

    def open_session(self, holder: str, committed: Iterable[int]) -> None:
        """Settle groups that are `committed`, and write down that the next session begins. The one before must end now."""
        self.refuse_when_closed()
        self._settle(self._known(committed))
        if self._store:
            self._store.session(self.newest_session + 1, holder)
        self.newest_session += 1

    def close_session(self) -> None:
        """Write down that the newest session is over. It must end now."""
        if self._store:
            self._store.session(self.newest_session, None)

    def end_session(self, lost: LeaseLost) -> None:
        """Everything that was leased or trained without a commit waits again. Leases that wait raise `lost`."""
        returned = list(self._taken.values())
        self._taken.clear()
        self._freed.clear()
        self._trained_bytes = self._trained_sequences = self._trained_groups = 0
        self._unmet = None
        self._selector.done()
        self._take_back(returned)
        while self._leases:
            request = self._leases.popleft()
            if not request.answer.done():
                request.answer.set_exception(lost)
        self.proceed()

    # -- lease

    def lease(self, size: BatchSize, version: int) -> list[GroupRecord[T]] | None:
        """Return a batch, or None if none can be formed now."""
        if self._leases:
            return None
        batch = self._form_batch(size, version)
        if batch is not None or self._queues.puts_waiting:
            self.proceed()
        return batch

    def wait_for_batch(self, size: BatchSize, version: int) -> PendingLease[T]:
        """Return the request of a batch that could not be leased. Its answer comes once the batch can be formed."""
        request: PendingLease[T] = PendingLease(size, version, asyncio.get_running_loop().create_future())
        self._leases.append(request)
        return request

    def withdraw_lease(self, request: PendingLease[T]) -> None:
        """End a request, whether it was answered or not."""
        if not request.answer.done():
            request.answer.cancel()
            self._leases.remove(request)
            self.proceed()

    @property
    def retry_s(self) -> float:
        """After how many seconds a batch may be possible even if nothing else happens."""
        return max(self._selector.retry_s, 0.01)

    def _form_batch(self, size: BatchSize, version: int) -> list[GroupRecord[T]] | None:
        self._drop_stale(version)
        self._unmet = size
        while self._admit_pending() | self._admit_smaller():
            self._drop_stale(version)
        while (batch := self._selector.form(size, stuck=self._queues.is_stuck())) is not None:
            batch.sort(key=lambda record: record.id)
            copies = [self._with_payload(record) for record in batch]
            damaged = {record.id for record in copies if record.payload is None}
            if damaged:
                self._settle([record for record in batch if record.id in damaged], "damaged")
                continue
            self._mark(batch, "leased")
            self._queues.mark_time()
            for record in batch:
                self._queues.dequeue(record, served=True)
                record.state = "leased"
                self._taken[record.id] = record
                if self._store:
                    record.payload = cast(T, None)
            self._unmet = None
            self._selector.done()
            return copies
        return None

    def _watch_version(self, record: GroupRecord[T]) -> None:
        if self.max_staleness is not None and record.label.oldest_version is not None:
            heapq.heappush(self._by_version, (record.label.oldest_version, record.id))
        if len(self._by_version) > 2 * len(self._records) + 1000:  # most of them have left
            waiting = (one for one in self._records.values() if one.state == "waiting")
            self._by_version = [
                (one.label.oldest_version, one.id) for one in waiting if one.label.oldest_version is not None
            ]
            heapq.heapify(self._by_version)

    def _drop_stale(self, version: int) -> None:
        """Drop stale groups, also those that are admitted into the room of others."""
        if self.max_staleness is None:
            return
        while stale := self._take_stale(version - self.max_staleness):
            try:
                self._settle(stale, "stale")
            except StoreFull:
                for record in stale:
                    self._watch_version(record)
                raise
            self._admit_pending()

    def _take_stale(self, oldest: int) -> list[GroupRecord[T]]:
        stale: dict[int, GroupRecord[T]] = {}
        while self._by_version and self._by_version[0][0] < oldest:
            _, id = heapq.heappop(self._by_version)
            record = self._records.get(id)
            if record is not None and record.state == "waiting":
                stale[id] = record
        return list(stale.values())

    # -- what was leased

    def taken(self) -> Mapping[int, str]:
        """Return the ids that the session has leased or trained, with which of the two."""
        return {id: record.state for id, record in self._taken.items()} | dict.fromkeys(self._freed, "trained")

    def take_back(self, ids: Iterable[int]) -> None:
        """Undo a lease. Groups that already wait or are settled are skipped."""
        some = [record for id in ids if (record := self._taken.get(id)) is not None]
        if trained := [record.id for record in some if record.state == "trained"]:
            raise DataError(f"groups {trained} are trained: they cannot be given back")
        self._mark(some, "waiting")
        for record in some:
            del self._taken[record.id]
        self._take_back(some)
        self.proceed()

    def train(self, ids: Iterable[int]) -> None:
        """Mark leased groups as trained. Those that are trained or settled are skipped. Raises LeaseLost for one that waits."""
        records = self._known(ids)
        for record in records:
            if record.state == "waiting":
                raise LeaseLost(f"group {record.id} is not leased to session {self.newest_session}", remedy=RESUME)
        some = [record for record in records if record.state == "leased"]
        self._mark(some, "trained")
        for record in some:
            record.state = "trained"
            if self._keep_trained:
                self._count_trained(record, 1)
            else:
                self._freed.add(record.id)
                del self._records[record.id], self._taken[record.id]
                self._queues.leave_room(record.label)
        self.proceed()

    def commit(self, ids: Iterable[int] | None) -> int:
        """Settle groups, without `ids` all trained ones, and return how many. Those that are settled or unknown are skipped."""
        if ids is None:
            ids = [id for id, state in self.taken().items() if state == "trained"]
        ids = list(ids)
        settled, freed = self._known(ids), self._freed.intersection(ids)
        self._settle(settled)
        self._freed -= freed
        self._committed += len(freed)
        self.proceed()
        return len(settled) + len(freed)

    def drop(self, ids: Iterable[int], cause: str) -> int:
        """Remove groups, and return how many. Those that are settled or unknown are skipped."""
        some = self._known(ids)
        self._settle(some, cause)
        self.proceed()
        return len(some)

    @property
    def commit_due(self) -> bool:
        """True if trained groups take more than half of the hub."""
        bound = self._limits.sequences
        by_sequences = bound is not None and 2 * self._trained_sequences > bound
        return 2 * self._trained_bytes > self._limits.size_bytes or by_sequences

    def _take_back(self, returned: list[GroupRecord[T]]) -> None:
        for record in returned:
            record.state = "waiting"
            self._watch_version(record)
        self._queues.requeue(returned)

    def _settle(self, some: Sequence[GroupRecord[T]], cause: str | None = None) -> None:
        """Remove groups from the hub: committed, or dropped for a `cause`."""
        if not some:
            return
        dropped = [self._with_payload(record) for record in some] if cause is not None else []
        if self._store:
            self._store.settle([record.id for record in some], committed=cause is None)
        for record in some:
            del self._records[record.id]
            if record.state == "waiting":
                self._queues.dequeue(record, served=False)
            else:
                del self._taken[record.id]
                if record.state == "trained":
                    self._count_trained(record, -1)
            self._queues.leave_room(record.label)
            if cause is None:
                self._committed += 1
            else:
                self._dropped[cause] += 1
        for record in dropped:
            self._on_dropped(record, cause or "")

    def _known(self, ids: Iterable[int]) -> list[GroupRecord[T]]:
        return [record for id in dict.fromkeys(ids) if (record := self._records.get(id)) is not None]

    def _mark(self, some: Sequence[GroupRecord[T]], state: State) -> None:
        if some and self._store:
            self._store.mark([record.id for record in some], state)

    def _count_trained(self, record: GroupRecord[T], sign: int) -> None:
        self._trained_groups += sign
        self._trained_bytes += sign * record.label.size_bytes
        self._trained_sequences += sign * record.label.sequences

    def _with_payload(self, record: GroupRecord[T]) -> GroupRecord[T]:
        """Return a copy for other code. Its payload is None if the store's is damaged."""
        payload: T | None = record.payload
        if payload is None and self._store is not None:
            try:
                payload = self._store.read(record.id)
            except DataError as error:
                console.warn(f"{error} Its group of task {record.label.task!r} is dropped.")
        return replace(record, payload=cast(T, payload), waited_s=self.clock() - record.since)

    # -- progress

    def proceed(self) -> None:
        """Do everything that has become possible: puts that fit, leases that can be filled."""
        while self._admit_pending() | self._serve():
            pass
        stuck = self._leases and self._is_starving and self._queues.is_stuck()
        if stuck and (short := reports.short(self._queues, len(self._records))):
            request = self._leases.popleft()
            self._unmet = None
            held, trained = len(self._records), self._trained_groups
            request.answer.set_exception(reports.too_small(self._queues, request.size, held, trained, short))
            self.proceed()

    def _serve(self) -> bool:
        served = False
        while self._leases:
            request = self._leases[0]
            try:
                batch = self._form_batch(request.size, request.version)
            except StoreFull as error:
                self._leases.popleft()
                request.answer.set_exception(error)
                continue
            if batch is None:
                break
            self._leases.popleft()
            request.answer.set_result(batch)
            served = True
        return served

    def refuse_when_closed(self) -> None:
        if self._closed:
            raise HubClosed("the hub is closed: the run is ending")

    def stop(self) -> None:
        """Answer everything that waits with HubClosed; may be called twice. Groups stay in the store, and can still be settled."""
        self._closed = True
        closed = HubClosed("the hub is closed: the run is ending")
        for put in self._queues.clear_pending():
            put.answer.set_exception(closed)
        for request in self._leases:
            request.answer.set_exception(closed)
        self._leases.clear()

    # -- what is known

    def why_no_batch(self) -> str | None:
        """Say why the last requested batch cannot be formed; None if nothing is missing."""
        if self._unmet is None:
            return None
        leased, held_up_by = len(self._taken) - self._trained_groups, self._selector.held_up_by
        return reports.why_no_batch(self._queues, self._unmet, held_up_by, leased, self._trained_groups)

    def status(self) -> HubStatus:
        """Return the figures. Takes the same time for any number of groups."""
        queues = self._queues
        oldest = [next(iter(queue.waiting.values())).since for queue in queues.by_name.values() if queue.waiting]
        return HubStatus(
            groups=queues.waiting,
            sequences=queues.waiting_sequences,
            size_bytes=sum(queue.waiting_bytes for queue in queues.by_name.values()),
            leased=len(self._taken) - self._trained_groups,
            trained=self._trained_groups + len(self._freed),
            committed=self._committed,
            held_bytes=queues.held_bytes,
            held_sequences=queues.held_sequences,
            limits=self._limits,
            puts_waiting=queues.puts_waiting,
            oldest_s=self.clock() - min(oldest) if oldest else None,
            environments={name: queue.status() for name, queue in queues.by_name.items()},
            dropped=dict(self._dropped),
            why=self.why_no_batch(),
        )

    def state(self) -> Mapping[str, Any]:
        """Return the state for the checkpoint that `commit` follows, if the hub is in the run's own process."""
        committed = self._committed + self._trained_groups + len(self._freed)
        return {"next": self._next, "committed": committed, "stale": self._dropped["stale"]}

    def load(self, state: Mapping[str, Any]) -> None:
        """Restore a state. Raises KeyError, TypeError, ValueError."""
        counts = [int(state[name]) for name in ("next", "committed", "stale")]
        self._next, self._committed, self._dropped["stale"] = counts

    def restore(self, known: Restored[T]) -> None:
        """Take up the content of the store."""
        now = self.clock()
        self._next, self._committed, self.newest_session = known.next_id, known.committed, known.session
        self._keys.update(list(known.keys)[-KEYS:])
        for record in known.records:
            self._records[record.id] = record
            self._queues.take_room(record.label, now)
            if record.state == "waiting":
                self._queues.enqueue(record)
                self._watch_version(record)
            else:
                self._taken[record.id] = record
                if record.state == "trained":
                    self._count_trained(record, 1)


def _digest(key: str | None) -> bytes | None:
    return None if key is None else blake2b(key.encode(errors="surrogatepass"), digest_size=16).digest()

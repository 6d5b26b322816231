"""The groups in the hub and their states, shared by the hub, its session and its diagnostics."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from dataclasses import replace
from typing import Generic, TypeVar, cast

from atropos_core import console
from atropos_core.errors import DataError
from atropos_core.hub.batch_selector import BatchSelector
from atropos_core.hub.fair_queue import EnvironmentQueues
from atropos_core.hub.lease_session import LeaseRequest
from atropos_core.hub.records import GroupRecord, Limits, Store, Want

T = TypeVar("T")


class Ledger(Generic[T]):
    """Only the hub changes it; other code reads it between two turns of the event loop."""

    def __init__(
        self,
        limits: Limits,
        store: Store[T] | None,
        clock: Callable[[], float],
        allocation_grace_s: float,
        keep_trained: bool,
    ) -> None:
        self.limits = limits
        self.store = store
        self.clock = clock
        self.keep_trained = keep_trained
        self.queues: EnvironmentQueues[T] = EnvironmentQueues(limits)
        self.selector = BatchSelector(self.queues, allocation_grace_s, clock)
        self.records: dict[int, GroupRecord[T]] = {}  # all that is in the hub, by id
        self.out: dict[int, GroupRecord[T]] = {}  # leased or trained, by the current session
        self.by_version: list[tuple[int, int]] = []  # heap of (oldest version, id) of what waits or waited
        self.let_go: set[int] = set()  # trained, not committed, not kept
        self.trained_bytes = self.trained_sequences = self.trained_groups = 0
        self.committed = 0
        self.dropped: Counter[str] = Counter()  # by cause
        self.offers = 0  # groups that wait for room
        self.requests: deque[LeaseRequest[T]] = deque()  # leases that wait for their batch
        self.unmet: Want | None = None  # the last batch that could not be formed

    @property
    def starving(self) -> bool:
        """True if the last requested batch needs more than waits: now fairness must not keep anything out."""
        want, queues = self.unmet, self.queues
        if want is None:
            return False
        return (queues.waiting if want.groups else queues.waiting_sequences) < want.size

    def is_stuck(self) -> bool:
        """True if a group waits for room that only the trainer can free."""
        if not self.offers:
            return False
        queues = self.queues
        return any(queue.offers and not queues.fits(queue.offers[0].label) for queue in queues.by_name.values())

    def count_trained(self, record: GroupRecord[T], sign: int) -> None:
        self.trained_groups += sign
        self.trained_bytes += sign * record.label.size_bytes
        self.trained_sequences += sign * record.label.sequences

    def with_payload(self, record: GroupRecord[T]) -> GroupRecord[T]:
        """Return a copy for other code. Its payload is None if the store's is damaged."""
        payload: T | None = record.payload
        if payload is None and self.store is not None:
            try:
                payload = self.store.read(record.id)
            except DataError as error:
                console.warn(f"{error} Its group of task {record.label.task!r} is dropped.")
        return replace(record, payload=cast(T, payload), waited_s=self.clock() - record.since)

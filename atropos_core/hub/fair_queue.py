"""Fairness between environments: whose group is next, which groups a batch must include, and which environments may fill the hub.

Weighted fair queuing by start times (Goyal, Vin and Cheng 1996, "Start-time Fair Queuing", equations 4 and 5), in sequences.
Each group that a queue gives adds sequences / weight to its `passed`, and the queue with the lowest `passed` is next. A queue
that was empty starts at the level of the others, so silence earns nothing.
"""

from __future__ import annotations

import asyncio
import heapq
from collections import Counter, OrderedDict, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from atropos_core.hub.records import BatchSize, EnvironmentStatus, GroupRecord, Label, Limits

T = TypeVar("T")
RESERVED = 0.25  # of the room, kept for environments that hold less than their share


@dataclass(slots=True, eq=False)
class PendingPut(Generic[T]):
    """A group that waits for room."""

    payload: T
    label: Label
    key: bytes | None
    answer: asyncio.Future[int]


@dataclass(slots=True)
class EnvironmentQueue(Generic[T]):
    """One environment: its waiting groups, the oldest first, and the totals of all its groups."""

    name: str
    last_put: float  # or when it was registered
    weight: float = 1.0
    minimum: float = 0.0
    registered: bool = False
    silent: bool = False  # lost its minimum until it sends again
    passed: float = 0.0
    waiting: OrderedDict[int, GroupRecord[T]] = field(default_factory=OrderedDict)
    waiting_sequences: int = 0
    waiting_bytes: int = 0
    held_sequences: int = 0
    held_bytes: int = 0
    pending: deque[PendingPut[T]] = field(default_factory=deque)

    @property
    def is_needed(self) -> bool:
        return self.registered or bool(self.held_sequences or self.waiting or self.pending)

    def status(self) -> EnvironmentStatus:
        return EnvironmentStatus(
            groups=len(self.waiting),
            sequences=self.waiting_sequences,
            size_bytes=self.waiting_bytes,
            held_bytes=self.held_bytes,
            puts_waiting=len(self.pending),
            weight=self.weight,
            minimum=self.minimum,
        )


class EnvironmentQueues(Generic[T]):
    """Every environment that is registered, waits or has groups in the hub, with the totals over all."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.by_name: dict[str, EnvironmentQueue[T]] = {}
        self.waiting = 0
        self.waiting_sequences = 0
        self.held_bytes = 0
        self.held_sequences = 0
        self.puts_waiting = 0
        self.sizes: Counter[int] = Counter()  # how many groups of each number of sequences wait
        self._weights = 0.0  # of all queues
        self._fair = False  # True once a share was requested
        self._virtual = 0.0

    def queue(self, name: str, now: float) -> EnvironmentQueue[T]:
        queue = self.by_name.get(name)
        if queue is None:
            queue = self.by_name[name] = EnvironmentQueue(name, now, passed=self._virtual)
            self._weights += queue.weight
        return queue

    def register(self, name: str, weight: float, minimum: float, now: float) -> None:
        queue = self.queue(name, now)
        if not queue.registered:
            queue.last_put = now
        queue.weight, queue.minimum, queue.registered = weight, minimum, True
        self._fair = True
        self._weights = sum(queue.weight for queue in self.by_name.values())

    def forget(self, name: str) -> None:
        if queue := self.by_name.get(name):
            queue.weight, queue.minimum, queue.registered = 1.0, 0.0, False
            self.tidy(name)
        self._fair = any(queue.registered for queue in self.by_name.values())
        self._weights = sum(queue.weight for queue in self.by_name.values())

    def tidy(self, name: str) -> None:
        queue = self.by_name.get(name)
        if queue and not queue.is_needed:
            del self.by_name[name]
            self._weights -= queue.weight

    # -- what the hub keeps

    def enqueue(self, record: GroupRecord[T]) -> EnvironmentQueue[T]:
        queue = self.queue(record.label.environment, record.since)
        if not queue.waiting:
            queue.passed = max(queue.passed, self._virtual)
        queue.waiting[record.id] = record
        self._count_waiting(queue, record.label, 1)
        return queue

    def requeue(self, returned: list[GroupRecord[T]]) -> None:
        """Put each group back where it was in its queue, and refund its cost to the queue."""
        by_environment: dict[str, list[GroupRecord[T]]] = {}
        for record in sorted(returned, key=lambda record: record.id):
            by_environment.setdefault(record.label.environment, []).append(record)
        for name, some in by_environment.items():
            queue = self.by_name[name]
            for record in some:
                queue.passed -= record.label.sequences / queue.weight
                self._count_waiting(queue, record.label, 1)
            first = next(iter(queue.waiting), None)
            if first is None or some[-1].id < first:
                for record in reversed(some):
                    queue.waiting[record.id] = record
                    queue.waiting.move_to_end(record.id, last=False)
            else:
                both = [*some, *queue.waiting.values()]
                queue.waiting = OrderedDict(
                    (record.id, record) for record in sorted(both, key=lambda record: record.id)
                )

    def dequeue(self, record: GroupRecord[T], *, served: bool) -> None:
        queue = self.by_name[record.label.environment]
        del queue.waiting[record.id]
        self._count_waiting(queue, record.label, -1)
        if served:
            queue.passed += record.label.sequences / queue.weight

    def take_room(self, label: Label, now: float) -> None:
        queue = self.queue(label.environment, now)
        queue.held_bytes += label.size_bytes
        queue.held_sequences += label.sequences
        self.held_bytes += label.size_bytes
        self.held_sequences += label.sequences

    def leave_room(self, label: Label) -> None:
        queue = self.by_name[label.environment]
        queue.held_bytes -= label.size_bytes
        queue.held_sequences -= label.sequences
        self.held_bytes -= label.size_bytes
        self.held_sequences -= label.sequences
        self.tidy(label.environment)

    def _count_waiting(self, queue: EnvironmentQueue[T], label: Label, sign: int) -> None:
        queue.waiting_sequences += sign * label.sequences
        queue.waiting_bytes += sign * label.size_bytes
        self.waiting += sign
        self.waiting_sequences += sign * label.sequences
        self.sizes[label.sequences] += sign
        if not self.sizes[label.sequences]:
            del self.sizes[label.sequences]

    # -- who is next

    def in_order(self) -> Iterator[GroupRecord[T]]:
        """Yield waiting groups in the order of service. Lazy: a batch costs only the groups that it looks at."""
        heads = []
        for queue in self.by_name.values():
            rest = iter(queue.waiting.values())
            if (first := next(rest, None)) is not None:
                heads.append((queue.passed if self._fair else first.id, first.id, first, queue.weight, rest))
        heapq.heapify(heads)
        while heads:
            passed, _, record, weight, rest = heads[0]
            yield record
            if (after := next(rest, None)) is None:
                heapq.heappop(heads)
            else:
                passed = passed + record.label.sequences / weight if self._fair else after.id
                heapq.heapreplace(heads, (passed, after.id, after, weight, rest))

    def mark_time(self) -> None:
        """Called before a batch is taken: from now on, a queue that was empty starts at the lowest level of the others."""
        least = min((queue.passed for queue in self.by_name.values() if queue.waiting), default=self._virtual)
        self._virtual = max(self._virtual, least)

    def quotas(self, wanted: BatchSize) -> dict[str, int]:
        """Return how much of a batch is due to each environment with a minimum. Minima above a whole batch are scaled down."""
        minima = {
            queue.name: queue.minimum for queue in self.by_name.values() if queue.minimum > 0 and not queue.silent
        }
        scale = max(1.0, sum(minima.values()))
        return {name: int(wanted.number * minimum / scale + 1e-9) for name, minimum in minima.items()}

    def due(self, wanted: BatchSize, quotas: dict[str, int]) -> list[GroupRecord[T]]:
        """Return the groups that `quotas` put into a batch: each queue's oldest, until its quota is reached or it is empty."""
        chosen: list[GroupRecord[T]] = []
        room = wanted.number
        for name, quota in quotas.items():
            taken = 0
            for record in self.by_name[name].waiting.values():
                size = wanted.of(record.label)
                if taken >= quota or size > room:
                    break
                chosen.append(record)
                taken += size
                room -= size
        return chosen

    # -- who may come in

    def fits(self, label: Label) -> bool:
        """True if the limits leave room for it."""
        bound = self.limits.sequences
        return self.held_bytes + label.size_bytes <= self.limits.size_bytes and (
            bound is None or self.held_sequences + label.sequences <= bound
        )

    def may_take(self, label: Label) -> bool:
        """True if fairness lets this environment take the room: the last quarter is for those below their share."""
        if len(self.by_name) < 2:
            return True
        queue = self.by_name.get(label.environment)
        for record, more, all_held, bound in (
            (queue.held_bytes if queue else 0, label.size_bytes, self.held_bytes, self.limits.size_bytes),
            (queue.held_sequences if queue else 0, label.sequences, self.held_sequences, self.limits.sequences),
        ):
            if bound is not None and all_held + more > (1 - RESERVED) * bound and record >= self._share(queue) * bound:
                return False
        return True

    def _share(self, queue: EnvironmentQueue[T] | None) -> float:
        own = queue.weight if queue else 1.0
        return own / (self._weights + (0.0 if queue else own))

    # -- puts that wait for room

    def add_pending(self, put: PendingPut[T], now: float) -> bool:
        """Return True if it is the first of its environment: only then may it be possible now."""
        queue = self.queue(put.label.environment, now)
        queue.last_put, queue.silent = now, False
        queue.pending.append(put)
        self.puts_waiting += 1
        return len(queue.pending) == 1

    def remove_pending(self, put: PendingPut[T]) -> None:
        self.by_name[put.label.environment].pending.remove(put)
        self.puts_waiting -= 1

    def clear_pending(self) -> list[PendingPut[T]]:
        """Remove all, and return them."""
        removed = [put for queue in self.by_name.values() for put in queue.pending]
        for put in removed:
            self.remove_pending(put)
        return removed

    def with_pending(self) -> list[EnvironmentQueue[T]]:
        """Return the queues that have puts waiting for room, the one that holds least of its share first."""
        some = (queue for queue in self.by_name.values() if queue.pending)
        return sorted(some, key=lambda queue: queue.held_bytes / queue.weight)

    def is_pending(self, environment: str) -> bool:
        """True if a put of this environment waits for room."""
        queue = self.by_name.get(environment)
        return queue is not None and bool(queue.pending)

    def is_stuck(self) -> bool:
        """True if a put waits for room that only the trainer can free."""
        if not self.puts_waiting:
            return False
        return any(queue.pending and not self.fits(queue.pending[0].label) for queue in self.by_name.values())

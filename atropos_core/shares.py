"""Fairness between environments: whose group is next, who must be part of a batch, and who may fill the hub.

Weighted fair queuing by start times (Goyal, Vin and Cheng 1996, "Start-time Fair Queuing", equations 4 and 5), in
sequences: a lane's `passed` grows by sequences / weight with every group that it gives, and the lane that has passed
least is next. A lane that was empty starts at the time of those that were not, so silence earns nothing.
"""

from __future__ import annotations

import asyncio
import heapq
from collections import Counter, OrderedDict, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from atropos_core.held import Held, Label, Limits, Want

T = TypeVar("T")
RESERVED = 0.25  # of the room, kept for environments that hold less than their share


@dataclass(slots=True, eq=False)
class Offer(Generic[T]):
    """A group that waits for room."""

    payload: T
    label: Label
    key: bytes | None
    answer: asyncio.Future[int]


@dataclass(slots=True)
class Lane(Generic[T]):
    """One environment: what waits of it, oldest first, and what all of it takes."""

    name: str
    last_put: float  # or when it was registered
    weight: float = 1.0
    minimum: float = 0.0
    registered: bool = False
    silent: bool = False  # lost its minimum until it sends again
    passed: float = 0.0
    waiting: OrderedDict[int, Held[T]] = field(default_factory=OrderedDict)
    waiting_sequences: int = 0
    waiting_bytes: int = 0
    held_sequences: int = 0
    held_bytes: int = 0
    offers: deque[Offer[T]] = field(default_factory=deque)

    @property
    def is_needed(self) -> bool:
        return self.registered or bool(self.held_sequences or self.waiting or self.offers)


class Lanes(Generic[T]):
    """Every environment that is registered, waits or is held, with the sums over all."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.by_name: dict[str, Lane[T]] = {}
        self.waiting = 0
        self.waiting_sequences = 0
        self.held_bytes = 0
        self.held_sequences = 0
        self.sizes: Counter[int] = Counter()  # how many groups of each number of sequences wait
        self._weights = 0.0  # of all lanes
        self._fair = False  # somebody has asked for a share
        self._virtual = 0.0

    def lane(self, name: str, now: float) -> Lane[T]:
        lane = self.by_name.get(name)
        if lane is None:
            lane = self.by_name[name] = Lane(name, now, passed=self._virtual)
            self._weights += lane.weight
        return lane

    def register(self, name: str, weight: float, minimum: float, now: float) -> None:
        lane = self.lane(name, now)
        if not lane.registered:
            lane.last_put = now
        lane.weight, lane.minimum, lane.registered = weight, minimum, True
        self._fair = True
        self._weights = sum(lane.weight for lane in self.by_name.values())

    def forget(self, name: str) -> None:
        if lane := self.by_name.get(name):
            lane.weight, lane.minimum, lane.registered = 1.0, 0.0, False
            self.tidy(lane)
        self._fair = any(lane.registered for lane in self.by_name.values())
        self._weights = sum(lane.weight for lane in self.by_name.values())

    def tidy(self, lane: Lane[T]) -> None:
        if not lane.is_needed and lane.name in self.by_name:
            del self.by_name[lane.name]
            self._weights -= lane.weight

    # -- what is held

    def enqueue(self, held: Held[T]) -> Lane[T]:
        lane = self.lane(held.label.environment, held.since)
        if not lane.waiting:
            lane.passed = max(lane.passed, self._virtual)
        lane.waiting[held.id] = held
        self._count_waiting(lane, held.label, 1)
        return lane

    def requeue(self, returned: list[Held[T]]) -> None:
        """Each goes back to where it stood in its lane, and what it cost its lane is given back."""
        by_lane: dict[str, list[Held[T]]] = {}
        for held in sorted(returned, key=lambda held: held.id):
            by_lane.setdefault(held.label.environment, []).append(held)
        for name, some in by_lane.items():
            lane = self.by_name[name]
            for held in some:
                lane.passed -= held.label.sequences / lane.weight
                self._count_waiting(lane, held.label, 1)
            first = next(iter(lane.waiting), None)
            if first is None or some[-1].id < first:
                for held in reversed(some):
                    lane.waiting[held.id] = held
                    lane.waiting.move_to_end(held.id, last=False)
            else:
                both = [*some, *lane.waiting.values()]
                lane.waiting = OrderedDict((held.id, held) for held in sorted(both, key=lambda held: held.id))

    def dequeue(self, held: Held[T], *, served: bool) -> None:
        lane = self.by_name[held.label.environment]
        del lane.waiting[held.id]
        self._count_waiting(lane, held.label, -1)
        if served:
            lane.passed += held.label.sequences / lane.weight

    def take_room(self, label: Label, now: float) -> None:
        lane = self.lane(label.environment, now)
        lane.held_bytes += label.size_bytes
        lane.held_sequences += label.sequences
        self.held_bytes += label.size_bytes
        self.held_sequences += label.sequences

    def leave_room(self, label: Label) -> None:
        lane = self.by_name[label.environment]
        lane.held_bytes -= label.size_bytes
        lane.held_sequences -= label.sequences
        self.held_bytes -= label.size_bytes
        self.held_sequences -= label.sequences
        self.tidy(lane)

    def _count_waiting(self, lane: Lane[T], label: Label, sign: int) -> None:
        lane.waiting_sequences += sign * label.sequences
        lane.waiting_bytes += sign * label.size_bytes
        self.waiting += sign
        self.waiting_sequences += sign * label.sequences
        self.sizes[label.sequences] += sign
        if not self.sizes[label.sequences]:
            del self.sizes[label.sequences]

    # -- who is next

    def in_order(self) -> Iterator[Held[T]]:
        """What waits, in the order of service. Lazy: a batch costs what it looks at, whatever waits behind."""
        heads = []
        for lane in self.by_name.values():
            rest = iter(lane.waiting.values())
            if (first := next(rest, None)) is not None:
                heads.append((lane.passed if self._fair else first.id, first.id, first, lane.weight, rest))
        heapq.heapify(heads)
        while heads:
            passed, _, held, weight, rest = heads[0]
            yield held
            if (after := next(rest, None)) is None:
                heapq.heappop(heads)
            else:
                passed = passed + held.label.sequences / weight if self._fair else after.id
                heapq.heapreplace(heads, (passed, after.id, after, weight, rest))

    def mark_time(self) -> None:
        """A batch is about to be taken: from now on a lane that was empty starts where the hindmost stands."""
        least = min((lane.passed for lane in self.by_name.values() if lane.waiting), default=self._virtual)
        self._virtual = max(self._virtual, least)

    def quotas(self, want: Want) -> dict[str, int]:
        """How much of a batch each environment with a minimum is due. Minima beyond a whole are scaled down."""
        minima = {lane.name: lane.minimum for lane in self.by_name.values() if lane.minimum > 0 and not lane.silent}
        scale = max(1.0, sum(minima.values()))
        return {name: int(want.size * minimum / scale + 1e-9) for name, minimum in minima.items()}

    def due(self, want: Want, quotas: dict[str, int]) -> list[Held[T]]:
        """The groups that `quotas` put into a batch: each lane's oldest, until its quota is reached or it is empty."""
        chosen: list[Held[T]] = []
        room = want.size
        for name, quota in quotas.items():
            taken = 0
            for held in self.by_name[name].waiting.values():
                size = want.of(held.label)
                if taken >= quota or size > room:
                    break
                chosen.append(held)
                taken += size
                room -= size
        return chosen

    # -- who may come in

    def fits(self, label: Label) -> bool:
        """Whether the limits have room for it."""
        bound = self.limits.sequences
        return self.held_bytes + label.size_bytes <= self.limits.size_bytes and (
            bound is None or self.held_sequences + label.sequences <= bound
        )

    def may_take(self, label: Label) -> bool:
        """Whether fairness lets this environment have the room: the last quarter is for those below their share."""
        if len(self.by_name) < 2:
            return True
        lane = self.by_name.get(label.environment)
        for held, more, all_held, bound in (
            (lane.held_bytes if lane else 0, label.size_bytes, self.held_bytes, self.limits.size_bytes),
            (lane.held_sequences if lane else 0, label.sequences, self.held_sequences, self.limits.sequences),
        ):
            if bound is not None and all_held + more > (1 - RESERVED) * bound and held >= self._share(lane) * bound:
                return False
        return True

    def _share(self, lane: Lane[T] | None) -> float:
        own = lane.weight if lane else 1.0
        return own / (self._weights + (0.0 if lane else own))

    def offering(self) -> list[Lane[T]]:
        """Lanes in which somebody waits for room, the one that holds least of its share first."""
        some: Iterable[Lane[T]] = (lane for lane in self.by_name.values() if lane.offers)
        return sorted(some, key=lambda lane: lane.held_bytes / lane.weight)

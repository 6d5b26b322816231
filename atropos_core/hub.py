"""The hub: raw scored groups between those that play and the one that trains.

Bounded in bytes, first in first out, leased, aware of policy versions. A group's life here: `put` (waits while the hub
is full), `lease`, then `trained` (its update is in memory; the payload is let go) or `give_back`, and `commit` once a
durable checkpoint holds the update. What is not committed when a run dies was never trained, as far as its resumed self
knows, and its draws are played again.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from atropos_core.errors import DataError, DeadlineExceeded, HubClosed
from atropos_core.types import ScoredGroup


@dataclass(frozen=True)
class Lease:
    """One group, handed out to the trainer alone."""

    id: int
    group: ScoredGroup


class Hub:
    """The in-process hub. Counts every byte that it holds, leased groups included.

    `on_stale` is told of groups that were dropped because training them would break `max_staleness`.
    """

    def __init__(self, size_bytes: int, max_staleness: int, on_stale: Callable[[ScoredGroup], None]) -> None:
        self.size_bytes = size_bytes
        self.max_staleness = max_staleness
        self.held_bytes = 0
        self.stale = 0
        self._on_stale = on_stale
        self._queue: deque[Lease] = deque()
        self._leased: dict[int, Lease] = {}
        self._trained: set[int] = set()  # not committed yet
        self._committed = 0
        self._next = 0
        self._changed = asyncio.Condition()
        self._closed = False
        self._wanted = 0  # groups that a waiting lease asks for

    def __len__(self) -> int:
        """Groups that wait to be leased."""
        return len(self._queue)

    async def put(self, group: ScoredGroup) -> None:
        """Return once the group is held. Raises DataError for one that could never fit, HubClosed at the end."""
        size = group.size_bytes
        if size > self.size_bytes:
            raise DataError(
                f"a group of task {group.task.id!r} holds {size / 1e6:.1f} MB, more than the whole hub ({self.size_bytes / 1e6:.1f} MB).",
                remedy="Raise hub.size_mb, or shorten the rollouts (sampling.max_tokens).",
            )
        async with self._changed:
            await self._changed.wait_for(
                lambda: self._closed or self.held_bytes + size <= self.size_bytes or self._wanted > len(self._queue)
            )
            self._refuse_when_closed()
            if self.held_bytes + size > self.size_bytes:
                raise DataError(
                    f"the hub is full ({self.size_bytes / 1e6:.1f} MB) with {len(self._queue)} groups waiting, and the step "
                    f"needs {self._wanted}: neither can go on.",
                    remedy="Raise hub.size_mb, or lower training.groups_per_step, group_size or sampling.max_tokens.",
                )
            self.held_bytes += size
            self._queue.append(Lease(self._next, group))
            self._next += 1
            self._changed.notify_all()

    async def lease(self, n: int, version: int, deadline_s: float) -> list[Lease]:
        """The `n` oldest groups, none with a token more than `max_staleness` versions behind `version`.
        Raises DeadlineExceeded where so many do not come."""
        try:
            async with asyncio.timeout(deadline_s), self._changed:
                self._wanted = n
                self._changed.notify_all()
                await self._changed.wait_for(lambda: self._closed or self._fresh(version) >= n)
                self._refuse_when_closed()
                leases = [self._queue.popleft() for _ in range(n)]
                self._leased |= {lease.id: lease for lease in leases}
                return leases
        except TimeoutError:
            raise DeadlineExceeded(f"the hub got {len(self)} of {n} groups within {deadline_s:g} s") from None
        finally:
            self._wanted = 0

    async def give_back(self, leases: Iterable[Lease]) -> None:
        """Undo a lease: the groups go back to where they stood in the queue."""
        async with self._changed:
            returned = [self._leased.pop(lease.id) for lease in leases]
            self._queue = deque(sorted([*returned, *self._queue], key=lambda lease: lease.id))
            self._changed.notify_all()

    async def trained(self, leases: Iterable[Lease]) -> None:
        """The groups were trained or deliberately dropped: let their payload go, remember their ids until `commit`."""
        async with self._changed:
            for lease in leases:
                self.held_bytes -= self._leased.pop(lease.id).group.size_bytes
                self._trained.add(lease.id)
            self._changed.notify_all()

    def commit(self) -> int:
        """Everything trained so far is inside a durable checkpoint. Returns how many groups that settles."""
        settled = len(self._trained)
        self._committed += settled
        self._trained.clear()
        return settled

    async def close(self) -> None:
        """Wake everyone who waits, with HubClosed."""
        self._closed = True
        async with self._changed:
            self._changed.notify_all()

    def state(self) -> Mapping[str, Any]:
        """To be saved in the checkpoint that `commit` follows."""
        return {"next": self._next, "committed": self._committed + len(self._trained), "stale": self.stale}

    def load(self, state: Mapping[str, Any]) -> None:
        self._next, self._committed, self.stale = state["next"], state["committed"], state["stale"]

    def _fresh(self, version: int) -> int:
        """How many wait, once those that are too old for `version` have been dropped."""
        for lease in [lease for lease in self._queue if version - lease.group.oldest_version > self.max_staleness]:
            self._queue.remove(lease)
            self.held_bytes -= lease.group.size_bytes
            self.stale += 1
            self._on_stale(lease.group)
            self._changed.notify_all()
        return len(self._queue)

    def _refuse_when_closed(self) -> None:
        if self._closed:
            raise HubClosed("the hub is closed: the run is ending")

"""Choose which waiting groups make the next batch: minimum allocations, then fair shares, then exact sums."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from itertools import islice, product
from typing import Generic, TypeVar

from atropos_core import console
from atropos_core.hub.fair_queue import EnvironmentQueues
from atropos_core.hub.records import BatchSize, GroupRecord
from atropos_core.hub.subset_sum import earliest, largest, multiples, reachable

T = TypeVar("T")
MOST_TRIED = 64  # ways to keep all minima


class BatchSelector(Generic[T]):
    """Chooses groups without taking them. After a call that found no batch, one may be possible in `retry_s`, even if nothing else
    happens. `held_up_by` is the environment whose minimum it waited for, if that was the cause."""

    def __init__(self, queues: EnvironmentQueues[T], grace_s: float, clock: Callable[[], float]) -> None:
        self.grace_s = grace_s
        self.retry_s = 1.0
        self.held_up_by: str | None = None
        self._queues = queues
        self._clock = clock
        self._passed_over: tuple[int, float] | None = (
            None  # the first group in order, if no batch contained it, and since when
        )
        self._warned_no_sum = False

    def done(self) -> None:
        """Called when a batch was taken, or is no longer wanted."""
        self.held_up_by = None

    def form(self, size: BatchSize, *, stuck: bool) -> list[GroupRecord[T]] | None:
        queues, now = self._queues, self._clock()
        self.retry_s, self.held_up_by = 1.0, None
        quotas = queues.quotas(size)
        for name in [name for name, quota in quotas.items() if quota and not queues.by_name[name].waiting]:
            queue = queues.by_name[name]
            if queue.pending:  # it has sent, and only the trainer can make room for it
                continue
            left = queue.last_put + self.grace_s - now
            if left > 0:
                self.retry_s, self.held_up_by = left, name
                return None
            queue.silent = True
            console.warn(
                f"environment {name!r} has sent nothing for {self.grace_s:g} s and loses its {queue.minimum:.0%} of "
                "a batch until it does"
            )
            quotas = queues.quotas(size)
        if size.sequences is not None:
            return self._form_sum(size.sequences, quotas, size, stuck)
        if queues.waiting < size.number:
            return None
        due = queues.due(size, quotas)
        return due + list(islice(self._others(due), size.number - len(due)))

    def _form_sum(
        self, total: int, quotas: dict[str, int], size: BatchSize, stuck: bool
    ) -> list[GroupRecord[T]] | None:
        """Return groups of `total` sequences. Try the first group in order with all minima; then the minima without that group,
        which may wait only for a limited time; then that group without some minima. If there is no such sum and waiting cannot
        help, return the largest smaller sum with the first group."""
        queues, now = self._queues, self._clock()
        first = next(queues.in_order(), None)
        if first is None or (queues.waiting_sequences < total and not stuck):
            return None
        if first.label.sequences >= total:
            return [first]
        due = queues.due(size, quotas)
        with_all = self._completed([first, *(record for record in due if record is not first)], total)
        if with_all is not None:
            return with_all
        if self._passed_over is None or self._passed_over[0] != first.id:
            self._passed_over = (first.id, now)
        patience = self._passed_over[1] + self.grace_s - now
        if patience > 0 and (without := self._completed(due, total)) is not None:
            return without
        for minima in self._other_minima(quotas, total) if due else ():
            if (
                with_first := self._completed([first, *(one for one in minima if one is not first)], total)
            ) is not None:
                return with_first
            if patience > 0 and (without := self._completed(minima, total)) is not None:
                return without
        while due:
            due.pop()
            if (with_first := self._completed([first, *(one for one in due if one is not first)], total)) is not None:
                return with_first
            if patience > 0 and (without := self._completed(due, total)) is not None:
                return without
        rest = total - first.label.sequences
        if not stuck and patience > 0 and multiples(queues.sizes, rest):
            self.retry_s = patience
            return None
        if not self._warned_no_sum:
            self._warned_no_sum = True
            console.warn(f"no whole groups of those that wait add up to {total} sequences: batches are smaller")
        below = largest(reachable(queues.sizes - Counter([first.label.sequences]), rest), rest)
        return self._completed([first], first.label.sequences + below)

    def _completed(self, forced: list[GroupRecord[T]], total: int) -> list[GroupRecord[T]] | None:
        """Add the earliest other groups that complete `total` sequences; None if there are none."""
        rest = total - sum(record.label.sequences for record in forced)
        if rest < 0:
            return None
        sizes = self._queues.sizes - Counter(record.label.sequences for record in forced)
        if not reachable(sizes, rest) >> rest & 1:
            return None
        return forced + _earliest(self._others(forced), rest)

    def _other_minima(self, quotas: Mapping[str, int], total: int) -> Iterator[list[GroupRecord[T]]]:
        """Yield other groups that satisfy every minimum, not the oldest of their environments; the smallest sums first."""
        sums: list[list[tuple[int, str]]] = []
        sending = {name: quota for name, quota in quotas.items() if quota and self._queues.by_name[name].waiting}
        of_each = max(1, int(MOST_TRIED ** (1 / max(len(sending), 1))))
        for name, quota in sending.items():
            waiting = self._queues.by_name[name].waiting
            sizes = Counter(record.label.sequences for record in islice(waiting.values(), total))
            found = reachable(sizes, total)
            least = min(quota, largest(found, total))
            every = [size for size in range(least, total + 1) if found >> size & 1]
            sums.append([(size, name) for size in every[:of_each]])
        combined = sorted(product(*sums), key=lambda one: sum(size for size, _ in one))
        for combination in combined:
            yield [
                record
                for size, name in combination
                for record in _earliest(islice(self._queues.by_name[name].waiting.values(), total), size)
            ]

    def _others(self, chosen: list[GroupRecord[T]]) -> Iterator[GroupRecord[T]]:
        ids = {record.id for record in chosen}
        return (record for record in self._queues.in_order() if record.id not in ids)


def _earliest(records: Iterator[GroupRecord[T]], total: int) -> list[GroupRecord[T]]:
    """Return the earliest groups that make `total` sequences; there must be some."""
    seen: list[GroupRecord[T]] = []

    def sizes() -> Iterator[int]:
        for record in records:
            seen.append(record)
            yield record.label.sequences

    return [seen[at] for at in earliest(sizes(), total)]

"""Which of the groups that wait make the next batch: minimum allocations, then fair shares, then exact sums."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Generic, TypeVar

from atropos_core import console
from atropos_core.hub.fair_queue import EnvironmentQueues
from atropos_core.hub.records import GroupRecord, Want
from atropos_core.hub.subset_sum import earliest, largest, multiples, reachable

T = TypeVar("T")


class BatchSelector(Generic[T]):
    """Chooses, and takes nothing. `retry_s` after a call that found no batch, one may be there though nothing else
    happened; `held_up_by` is then the environment whose minimum it waited for, if that was the cause."""

    def __init__(self, queues: EnvironmentQueues[T], grace_s: float, clock: Callable[[], float]) -> None:
        self.grace_s = grace_s
        self.retry_s = 1.0
        self.held_up_by: str | None = None
        self._queues = queues
        self._clock = clock
        self._no_sum_since: float | None = None
        self._warned_no_sum = False

    def done(self) -> None:
        """A batch was taken, or nobody wants one any more."""
        self._no_sum_since = self.held_up_by = None

    def form(self, want: Want, *, stuck: bool) -> list[GroupRecord[T]] | None:
        queues, now = self._queues, self._clock()
        self.retry_s, self.held_up_by = 1.0, None
        quotas = queues.quotas(want)
        for name in [name for name, quota in quotas.items() if quota and not queues.by_name[name].waiting]:
            queue = queues.by_name[name]
            if queue.offers:  # it has sent, and only the trainer can make room for it
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
            quotas = queues.quotas(want)
        if want.sequences is not None:
            return self._form_sum(want.sequences, queues.due(want, quotas), stuck)
        if queues.waiting < want.size:
            return None
        due = queues.due(want, quotas)
        return due + list(islice(self._others(due), want.size - len(due)))

    def _form_sum(self, total: int, due: list[GroupRecord[T]], stuck: bool) -> list[GroupRecord[T]] | None:
        """Groups of `total` sequences. The first in order is always among them, so that no size waits for ever; `due`
        as far as a sum allows. Where there is none: the largest below it, once it is clear that waiting cannot help."""
        queues, now = self._queues, self._clock()
        first = next(queues.in_order(), None)
        if first is None or (queues.waiting_sequences < total and not stuck):
            return None
        if first.label.sequences >= total:
            return [first]
        forced = [first, *(record for record in due if record is not first)]
        while True:
            rest = total - sum(record.label.sequences for record in forced)
            if rest >= 0:
                sizes = queues.sizes - Counter(record.label.sequences for record in forced)
                sums = reachable(sizes, rest)
                if sums >> rest & 1:
                    break
            if len(forced) > 1:
                forced.pop()
                continue
            if self._no_sum_since is None:
                self._no_sum_since = now
            patience = self._no_sum_since + self.grace_s - now
            if not stuck and patience > 0 and multiples(queues.sizes, rest):
                self.retry_s = patience
                return None
            rest = largest(sums, rest)
            if not self._warned_no_sum:
                self._warned_no_sum = True
                console.warn(f"no whole groups of those that wait add up to {total} sequences: batches are smaller")
            break
        seen: list[GroupRecord[T]] = []

        def sizes_in_order() -> Iterator[int]:
            for record in self._others(forced):
                seen.append(record)
                yield record.label.sequences

        return forced + [seen[place] for place in earliest(sizes_in_order(), rest)]

    def _others(self, chosen: list[GroupRecord[T]]) -> Iterator[GroupRecord[T]]:
        ids = {record.id for record in chosen}
        return (record for record in self._queues.in_order() if record.id not in ids)

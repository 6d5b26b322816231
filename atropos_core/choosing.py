"""Which of the groups that wait make the next batch: minimum allocations, then fair shares, then exact sums."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Generic, TypeVar

from atropos_core import console
from atropos_core.held import Held, Want
from atropos_core.shares import Lanes
from atropos_core.sums import earliest, largest, multiples, reachable

T = TypeVar("T")


class Chooser(Generic[T]):
    """Chooses, and takes nothing. `retry_s` after a call that found no batch, one may be there though nothing else
    happened; `held_up_by` is then the environment whose minimum it waited for, if that was the cause."""

    def __init__(self, lanes: Lanes[T], grace_s: float, clock: Callable[[], float]) -> None:
        self.grace_s = grace_s
        self.retry_s = 1.0
        self.held_up_by: str | None = None
        self._lanes = lanes
        self._clock = clock
        self._no_sum_since: float | None = None
        self._said_no_sum = False

    def done(self) -> None:
        """A batch was taken, or nobody wants one any more."""
        self._no_sum_since = self.held_up_by = None

    def form(self, want: Want, *, stuck: bool) -> list[Held[T]] | None:
        lanes, now = self._lanes, self._clock()
        self.retry_s, self.held_up_by = 1.0, None
        quotas = lanes.quotas(want)
        for name in [name for name, quota in quotas.items() if quota and not lanes.by_name[name].waiting]:
            lane = lanes.by_name[name]
            if lane.offers:  # it has sent, and only the trainer can make room for it
                continue
            left = lane.last_put + self.grace_s - now
            if left > 0:
                self.retry_s, self.held_up_by = left, name
                return None
            lane.silent = True
            console.warn(
                f"environment {name!r} has sent nothing for {self.grace_s:g} s and loses its {lane.minimum:.0%} of "
                "a batch until it does"
            )
            quotas = lanes.quotas(want)
        if want.sequences is not None:
            return self._form_sum(want.sequences, lanes.due(want, quotas), stuck)
        if lanes.waiting < want.size:
            return None
        due = lanes.due(want, quotas)
        return due + list(islice(self._others(due), want.size - len(due)))

    def _form_sum(self, total: int, due: list[Held[T]], stuck: bool) -> list[Held[T]] | None:
        """Groups of `total` sequences. The first in order is always among them, so that no size waits for ever; `due`
        as far as a sum allows. Where there is none: the largest below it, once it is clear that waiting cannot help."""
        lanes, now = self._lanes, self._clock()
        first = next(lanes.in_order(), None)
        if first is None or (lanes.waiting_sequences < total and not stuck):
            return None
        if first.label.sequences >= total:
            return [first]
        forced = [first, *(held for held in due if held is not first)]
        while True:
            rest = total - sum(held.label.sequences for held in forced)
            if rest >= 0:
                sizes = lanes.sizes - Counter(held.label.sequences for held in forced)
                sums = reachable(sizes, rest)
                if sums >> rest & 1:
                    break
            if len(forced) > 1:
                forced.pop()
                continue
            if self._no_sum_since is None:
                self._no_sum_since = now
            patience = self._no_sum_since + self.grace_s - now
            if not stuck and patience > 0 and multiples(lanes.sizes, rest):
                self.retry_s = patience
                return None
            rest = largest(sums, rest)
            if not self._said_no_sum:
                self._said_no_sum = True
                console.warn(f"no whole groups of those that wait add up to {total} sequences: batches are smaller")
            break
        seen: list[Held[T]] = []

        def sizes_in_order() -> Iterator[int]:
            for held in self._others(forced):
                seen.append(held)
                yield held.label.sequences

        return forced + [seen[place] for place in earliest(sizes_in_order(), rest)]

    def _others(self, chosen: list[Held[T]]) -> Iterator[Held[T]]:
        ids = {held.id for held in chosen}
        return (held for held in self._lanes.in_order() if held.id not in ids)

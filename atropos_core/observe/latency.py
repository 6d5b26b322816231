"""Durations of calls: count, sum and quantiles in constant memory.

The sketch is DDSketch (Masson, Rim and Lee 2019, arXiv 1908.10693), from its authors' library: a quantile is within 2 % of a real
value, whatever the distribution. Values are kept between a microsecond and a day, so that there are at most 630 buckets.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ddsketch.mapping import LogarithmicMapping
from ddsketch.store import DenseStore

ACCURACY = 0.02
SMALLEST_S, LARGEST_S = 1e-6, 86400.0
QUANTILES = (0.5, 0.95, 0.99)
WINDOW_S = 300.0
Clock = Callable[[], float]
_MAPPING = LogarithmicMapping(ACCURACY)
_AT_ONCE = (
    64  # calls that are put into buckets together: one at a time costs four times as much as all else that is counted
)


class Latency:
    """With a clock, quantiles cover the last one to two windows of five minutes; without one, everything. Count, sum and largest
    always cover everything."""

    def __init__(self, clock: Clock | None = None) -> None:
        self.count, self.sum_s, self.largest_s = 0, 0.0, 0.0
        self._clock = clock
        self._since = clock() if clock else 0.0
        self._now = DenseStore()
        self._before = DenseStore()
        self._unsorted: list[tuple[float, int]] = []  # of now, in no bucket yet

    def add(self, seconds: float, calls: int = 1) -> None:
        """Add `calls` calls that took `seconds` each."""
        if self._clock:
            self._turn(self._clock)
        self.count += calls
        self.sum_s += seconds * calls
        if seconds > self.largest_s:
            self.largest_s = seconds
        self._unsorted.append((seconds, calls))
        if len(self._unsorted) >= _AT_ONCE:
            self._sort()

    def quantile(self, share: float) -> float | None:
        """Return the seconds within which that share of the calls has ended; None without any."""
        if self._clock:
            self._turn(self._clock)
        self._sort()
        seen = self._now
        if self._before.count:
            seen = DenseStore()
            seen.copy(self._before)
            if self._now.count:
                seen.merge(self._now)
        if not seen.count:
            return None
        return float(_MAPPING.value(seen.key_at_rank(share * (seen.count - 1))))

    def merge(self, other: Latency) -> None:
        """Add only the values that never fall; old quantiles of another sketch would be misleading."""
        self.count += other.count
        self.sum_s += other.sum_s
        self.largest_s = max(self.largest_s, other.largest_s)

    def absorb(self, other: Latency) -> None:
        """Add everything, quantiles too. Neither may have a window."""
        self.merge(other)
        other._sort()
        if other._now.count:
            self._now.merge(other._now)

    def state(self) -> dict[str, Any]:
        """Return the whole state of a sketch without a window, as JSON."""
        self._sort()
        buckets = {str(at + self._now.offset): int(n) for at, n in enumerate(self._now.bins) if n}
        return {"count": self.count, "sum_s": self.sum_s, "largest_s": self.largest_s, "buckets": buckets}

    def load(self, state: Mapping[str, Any]) -> None:
        self.count, self.sum_s, self.largest_s = int(state["count"]), float(state["sum_s"]), float(state["largest_s"])
        self._now, self._unsorted = DenseStore(), []
        for key, n in state["buckets"].items():
            self._now.add(int(key), float(n))

    def _turn(self, clock: Clock) -> None:
        passed = clock() - self._since
        if passed >= WINDOW_S:
            self._sort()
            self._before = self._now if passed < 2 * WINDOW_S else DenseStore()
            self._now = DenseStore()
            self._since += WINDOW_S * (passed // WINDOW_S)

    def _sort(self) -> None:
        """Sort values into buckets, updating each bucket once."""
        unsorted, self._unsorted = self._unsorted, []
        found: dict[int, int] = {}
        for seconds, calls in unsorted:
            key = _MAPPING.key(min(max(seconds, SMALLEST_S), LARGEST_S))
            found[key] = found.get(key, 0) + calls
        for key, calls in found.items():
            self._now.add(key, calls)

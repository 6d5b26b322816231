"""Counters of the server's work, in constant memory: latencies, rates, bytes, staleness, drops.

Nothing here grows with time, traffic or the names that clients choose. A latency is one of at most 630 buckets (see
`atropos_core.observe.latency`: quantiles within 2 %, of the last five to ten minutes). Each kind of label has a bounded number of
values; further names are counted under "other". A worker that has been quiet for `QUIET_S` makes way for a new one, and its counts
are added to "other", so that no sum ever falls.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any, Generic, Protocol, TypeVar

from atropos_core.observe.latency import QUANTILES, Latency

OTHER = "other"
QUIET_S = 600.0
RATE_S = 30.0  # time constant of a rate
STALENESS_BOUNDS = (0, 1, 2, 4, 8, 16, 32, 64)
Clock = Callable[[], float]


class Rate:
    """Events per second: each counts with exp(-age / RATE_S), so two floats are enough memory."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._start = self._at = clock()
        self._weight = 0.0

    def add(self, n: float) -> None:
        now = self._clock()
        if now - self._at > 0.2:  # an exp() for every group would cost more than all the other counting
            self._weight *= math.exp((self._at - now) / RATE_S)
            self._at = now
        self._weight += n

    def per_second(self) -> float:
        now = self._clock()
        covered_s = RATE_S * (1 - math.exp((self._start - now) / RATE_S))  # less than RATE_S while young
        return self._weight * math.exp((self._at - now) / RATE_S) / max(covered_s, 1.0)


class Route:
    """One route of the server."""

    def __init__(self, clock: Clock) -> None:
        self.latency, self.rate = Latency(clock), Rate(clock)
        self.statuses: dict[int, int] = {}
        self.bytes_in = self.bytes_out = 0

    def merge(self, other: Route) -> None:
        self.latency.merge(other.latency)
        for status, n in other.statuses.items():
            self.statuses[status] = self.statuses.get(status, 0) + n
        self.bytes_in += other.bytes_in
        self.bytes_out += other.bytes_out

    def snapshot(self) -> dict[str, Any]:
        return {
            **_seconds(self.latency),
            "per_second": round(self.rate.per_second(), 3),
            "statuses": {str(status): n for status, n in sorted(self.statuses.items())},
            "bytes_in": self.bytes_in,
            "bytes_out": self.bytes_out,
        }


class Sender:
    """One worker, or all workers of one environment: the latency of its calls, and what it sent."""

    def __init__(self, clock: Clock) -> None:
        self.latency, self.rate = Latency(clock), Rate(clock)
        self.groups = self.sequences = self.size_bytes = 0

    def add(self, sequences: int, size_bytes: int) -> None:
        self.groups += 1
        self.sequences += sequences
        self.size_bytes += size_bytes
        self.rate.add(sequences)

    def merge(self, other: Sender) -> None:
        self.latency.merge(other.latency)
        self.groups += other.groups
        self.sequences += other.sequences
        self.size_bytes += other.size_bytes

    def snapshot(self) -> dict[str, Any]:
        return {
            **_seconds(self.latency),
            "sequences_per_second": round(self.rate.per_second(), 3),
            "groups": self.groups,
            "sequences": self.sequences,
            "bytes": self.size_bytes,
        }


class _Mergeable(Protocol):
    def merge(self, other: Any) -> None: ...


M = TypeVar("M", bound=_Mergeable)


class Bounded(Generic[M]):
    """At most `limit` names and "other". The name that has been quiet longest is first in the dict."""

    def __init__(self, limit: int, make: Callable[[Clock], M], clock: Clock) -> None:
        self._limit, self._make, self._clock = limit, make, clock
        self._seen: dict[str, tuple[float, M]] = {}
        self._other: M | None = None

    def of(self, name: str) -> M:
        now = self._clock()
        if name == OTHER:
            return self._rest()
        if (known := self._seen.pop(name, None)) is not None:
            self._seen[name] = (now, known[1])
            return known[1]
        if len(self._seen) >= self._limit:
            quietest, (last, counted) = next(iter(self._seen.items()))
            if now - last < QUIET_S:
                return self._rest()
            self._rest().merge(counted)
            del self._seen[quietest]
        made = self._make(self._clock)
        self._seen[name] = (now, made)
        return made

    def items(self) -> list[tuple[str, M]]:
        rest = [(OTHER, self._other)] if self._other is not None else []
        return sorted((name, counted) for name, (_, counted) in self._seen.items()) + rest

    def _rest(self) -> M:
        if self._other is None:
            self._other = self._make(self._clock)
        return self._other


class Count:
    """A number that only rises."""

    def __init__(self, clock: Clock) -> None:
        self.n = 0

    def merge(self, other: Count) -> None:
        self.n += other.n


class Counters:
    """All counters. Called on the server's event loop; no call waits, and each takes a few microseconds."""

    def __init__(
        self,
        *,
        clock: Clock = time.monotonic,
        routes: int = 64,
        workers: int = 64,
        environments: int = 64,
        causes: int = 32,
    ) -> None:
        self.started = clock()
        self.clock = clock
        self.routes = Bounded(routes, Route, clock)
        self.workers = Bounded(workers, Sender, clock)
        self.environments = Bounded(environments, Sender, clock)
        self.drops = Bounded(causes, Count, clock)
        self.refusals = Bounded(causes, Count, clock)
        self.staleness = [0] * (len(STALENESS_BOUNDS) + 1)
        self.staleness_sum = 0

    def request(
        self, route: str, worker: str, seconds: float, status: int, bytes_in: int, bytes_out: int, *, calls: int = 1
    ) -> None:
        """Count one answered call, or several that were answered together. `route` is the pattern, not the path; `worker` is ""
        if the caller is unknown."""
        seconds = max(seconds, 0.0)
        counted = self.routes.of(route)
        counted.latency.add(seconds, calls)
        counted.rate.add(calls)
        counted.statuses[status] = counted.statuses.get(status, 0) + calls
        counted.bytes_in += bytes_in
        counted.bytes_out += bytes_out
        if worker:
            self.workers.of(worker).latency.add(seconds, calls)

    def group(self, worker: str, environment: str, sequences: int, size_bytes: int) -> None:
        """Count one group that the hub took; `worker` may be "" here too."""
        if worker:
            self.workers.of(worker).add(sequences, size_bytes)
        self.environments.of(environment or OTHER).add(sequences, size_bytes)

    def lag(self, versions: int) -> None:
        """Count a group that was leased this many policy versions after its oldest token was sampled."""
        versions = max(versions, 0)
        place = next((i for i, bound in enumerate(STALENESS_BOUNDS) if versions <= bound), len(STALENESS_BOUNDS))
        self.staleness[place] += 1
        self.staleness_sum += versions

    def dropped(self, cause: str, n: int = 1) -> None:
        """Count groups that were acknowledged, or offered, and will not be trained. `cause` is a word, not a sentence."""
        self.drops.of(cause).n += n

    def refused(self, cause: str) -> None:
        """Count a connection that was turned away. `cause` is a word, not a sentence."""
        self.refusals.of(cause).n += 1

    def snapshot(self) -> dict[str, Any]:
        """Plain values for /v1/status: per route, worker and environment, and the input of the whole server."""
        environments = self.environments.items()
        return {
            "up_s": round(self.clock() - self.started, 3),
            "groups": sum(one.groups for _, one in environments),
            "sequences": sum(one.sequences for _, one in environments),
            "bytes": sum(one.size_bytes for _, one in environments),
            "sequences_per_second": round(sum(one.rate.per_second() for _, one in environments), 3),
            "routes": {name: one.snapshot() for name, one in self.routes.items()},
            "workers": {name: one.snapshot() for name, one in self.workers.items()},
            "environments": {name: one.snapshot() for name, one in environments},
            "dropped": {name: one.n for name, one in self.drops.items()},
            "refused_connections": {name: one.n for name, one in self.refusals.items()},
            "staleness": {
                **{str(bound): n for bound, n in zip(STALENESS_BOUNDS, self.staleness, strict=False)},
                "more": self.staleness[-1],
            },
        }


def _seconds(latency: Latency) -> dict[str, Any]:
    named = {f"p{round(share * 100)}_s": latency.quantile(share) for share in QUANTILES}
    return {"calls": latency.count, "seconds": round(latency.sum_s, 6), **named}

"""Times of a run: its stages, one after another, and its calls, which overlap. In constant memory.

A stage is something that the loop does or waits for. Stages add up to the wall time of the run; the rest is "other". A call is one
request to an engine, the trainer, a reward, an environment or the API; many may be in flight at once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from time import perf_counter
from types import TracebackType
from typing import Any, Literal

from atropos_core.observe.latency import QUANTILES, Latency
from atropos_core.types import Metrics

Kind = Literal["stage", "call"]
WORK = ("sample", "logprobs", "step", "save", "restore")  # calls that an engine or the trainer works in
MOST_NAMES = 256  # beyond which calls are counted under "other calls": names may come from outside


class Timed:
    """The measurements of one stage or kind of call."""

    def __init__(self, kind: Kind) -> None:
        self.kind: Kind = kind
        self.latency = Latency()
        self.items = 0.0  # groups, sequences, bytes: what the name counts
        self.busy_s = 0.0  # while at least one was in flight
        self.in_flight = 0
        self.began = 0.0  # of the present busy time
        self.reported_s = 0.0  # of seconds(), in the metrics of a step already

    def busy_until(self, now: float) -> float:
        return self.busy_s + (now - self.began if self.in_flight else 0.0)

    def seconds(self, now: float) -> float:
        """Return how long a stage took, or how long at least one call was in flight."""
        return self.latency.sum_s if self.kind == "stage" else self.busy_until(now)


class Span:
    """One stage or call while it lasts. `items` may be set inside."""

    __slots__ = ("_clock", "_of", "_start", "items")

    def __init__(self, of: Timed, clock: Callable[[], float], items: float) -> None:
        self._of, self._clock, self.items, self._start = of, clock, items, 0.0

    def __enter__(self) -> Span:
        now = self._start = self._clock()
        of = self._of
        if not of.in_flight:
            of.began = now
        of.in_flight += 1
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        now, of = self._clock(), self._of
        of.in_flight -= 1
        if not of.in_flight:
            of.busy_s += now - of.began
        of.latency.add(now - self._start)
        of.items += self.items


@dataclass(frozen=True)
class ProfileRow:
    """One line of the table. `seconds`, and their `share` of the wall time: for a call, while at least one was in flight."""

    name: str
    kind: Kind
    calls: int
    seconds: float
    share: float
    p50_s: float
    p95_s: float
    p99_s: float
    items_per_s: float | None


class Profile:
    """Shared by the parts of a run, which use `span` and `call`."""

    def __init__(self, clock: Callable[[], float] = perf_counter) -> None:
        self._clock = clock
        self._timed: dict[str, Timed] = {}
        self._started = self._reported = clock()
        self._before_s = 0.0  # wall time of this run's earlier processes
        self._idle_from: dict[str, float] = {}

    def span(self, name: str, items: float = 0.0) -> Span:
        """Measure a stage of the loop: `with profile.span("trainer", items=groups):`."""
        return Span(self._of(name, "stage"), self._clock, items)

    def call(self, name: str, items: float = 0.0) -> Span:
        """Measure a call that others may overlap: `with profile.call("engine/sample", items=n):`."""
        return Span(self._of(name, "call"), self._clock, items)

    def add(self, name: str, seconds: float, items: float = 0.0, kind: Kind = "stage") -> None:
        """Add a duration that was measured elsewhere."""
        of = self._of(name, kind)
        of.latency.add(seconds)
        of.busy_s += seconds
        of.items += items

    def began(self, seconds: float) -> None:
        """Record that the run has started up, and how long that took; counts so far are kept."""
        self._started = self._clock() - seconds
        self.add("start-up", seconds)

    @property
    def wall_s(self) -> float:
        return self._before_s + self._clock() - self._started

    def seconds(self) -> dict[str, float]:
        """Return the seconds of each stage, and "other"; they add up to the wall time."""
        spent = {name: of.latency.sum_s for name, of in self._timed.items() if of.kind == "stage"}
        return spent | {"other": max(self.wall_s - sum(spent.values()), 0.0)}

    def rows(self) -> list[ProfileRow]:
        """Return stages by their time, then calls by name."""
        wall, now = self.wall_s or 1.0, self._clock()
        rows = [_row(name, of, now, wall) for name, of in self._timed.items() if of.latency.count]
        other = self.seconds()["other"]
        rows.append(ProfileRow("other", "stage", 0, other, other / wall, 0.0, 0.0, 0.0, None))
        stages = sorted((row for row in rows if row.kind == "stage"), key=lambda row: -row.seconds)
        return stages + sorted((row for row in rows if row.kind == "call"), key=lambda row: row.name)

    def idle(self) -> dict[str, float]:
        """Return the share of the wall time in which the trainer, and each engine, had no request."""
        wall, now = self.wall_s or 1.0, self._clock()
        return {role: max(0.0, 1.0 - self._busy(role, now) / wall) for role in self._roles()}

    def ended(self, *names: str) -> int:
        """Return how many calls with these names have ended, in any component: "engine/sample" counts as "sample"."""
        of = (timed for name, timed in self._timed.items() if timed.kind == "call" and name.rpartition("/")[2] in names)
        return sum(timed.latency.count for timed in of)

    def step(self) -> Metrics:
        """Return seconds since the previous call of this method, by stage and call, and the idle share of each role."""
        now = self._clock()
        wall = max(now - self._reported, 1e-9)
        self._reported = now
        metrics: Metrics = {}
        for name, of in self._timed.items():
            total = of.seconds(now)
            metrics[f"time/{name.replace('.', '/')}_s"] = max(total - of.reported_s, 0.0)
            of.reported_s = total
        for role in self._roles():
            busy = self._busy(role, now)
            share = 1.0 - (busy - self._idle_from.get(role, 0.0)) / wall
            self._idle_from[role] = busy
            metrics[f"time/{role.replace('.', '/')}_idle_share"] = min(max(share, 0.0), 1.0)
        return metrics

    def state(self) -> dict[str, Any]:
        timed = {
            name: {"kind": of.kind, "items": of.items, "busy_s": of.busy_s, **of.latency.state()}
            for name, of in self._timed.items()
        }
        return {"wall_s": self.wall_s, "timed": timed}

    def load(self, state: Mapping[str, Any]) -> None:
        """Continue counting from a saved state; counts so far are kept."""
        now = self._clock()
        self._before_s += float(state["wall_s"])
        for name, saved in state["timed"].items():
            if name.startswith("environment.") and name.endswith("/play"):  # the call's name in older checkpoints
                name = f"{name.removesuffix('play')}rollout"
            of = self._of(name, saved["kind"])
            before, of.latency = of.latency, Latency()
            of.latency.load(saved)
            of.latency.absorb(before)
            of.items += float(saved["items"])
            of.busy_s += float(saved["busy_s"])
            of.reported_s = of.seconds(now)
        self._idle_from = {role: self._busy(role, now) for role in self._roles()}

    def _of(self, name: str, kind: Kind) -> Timed:
        found = self._timed.get(name)
        if found is None:
            if kind == "call" and len(self._timed) >= MOST_NAMES:
                name = "other calls"
            found = self._timed.setdefault(name, Timed(kind))
        return found

    def _roles(self) -> list[str]:
        """Return the roles ROLE among calls named ROLE/METHOD that are the trainer or an engine."""
        found = {name.partition("/")[0] for name, of in self._timed.items() if of.kind == "call"}
        return sorted(role for role in found if role == "trainer" or role.split(".")[0] == "engine")

    def _busy(self, role: str, now: float) -> float:
        """Return how long a role worked for the run; pausing and being paused do not count."""
        work = (f"{role}/{method}" for method in WORK)
        return sum(self._timed[name].busy_until(now) for name in work if name in self._timed)


def timed(profile: Profile | None, name: str, items: float = 0.0) -> Span | nullcontext[None]:
    """Measure a call if there is a profile."""
    return nullcontext() if profile is None else profile.call(name, items)


def _row(name: str, of: Timed, now: float, wall_s: float) -> ProfileRow:
    p50, p95, p99 = (of.latency.quantile(share) or 0.0 for share in QUANTILES)
    busy = of.seconds(now)
    per_s = of.items / busy if of.items and busy else None
    return ProfileRow(name, of.kind, of.latency.count, busy, busy / wall_s, p50, p95, p99, per_s)

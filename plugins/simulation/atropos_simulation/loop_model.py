"""Simulate the training loop (docs/how-a-run-works.md) with figures instead of work: step times, and which part waits.

A step requests the groups that it lacks plus those of `max_staleness` further steps. It leases the first that arrive, drops
those with a token that is too old, trains on what the transforms leave, and publishes while the engines are paused.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from atropos_core.guards.collector import without_collector
from atropos_simulation.events import Clock, Engine, Event, Gate, Process, Server
from atropos_simulation.figures import Figures

MORE_ALLOWED = 8  # sequences that the engine of a prompt may have beyond the least busy one, as in core's EngineRouter


@dataclass(frozen=True)
class ClusterSize:
    """The numbers of engines and workers."""

    engines: int
    workers: int = 1


@dataclass(frozen=True)
class Outcome:
    """The result, measured after the first steps. Rates count only samples of groups that a trainer leased."""

    fleet: ClusterSize
    steps: int
    step_s: float
    trajectories_per_s: float
    tokens_per_s: float
    engine_idle: float  # share of the time, over all engines
    engine_load: float  # tokens/s as a share of all engines' peak
    sequences: float  # in an engine, while it has some
    trainer_idle: float
    publishing: float  # share of the time
    hub_busy: float
    worker_busy: float  # of the busiest
    stale_share: float  # of groups that were sampled
    tokens_in: int = 0  # that were requested of engines, all steps
    tokens_out: float = 0.0  # that engines have sampled, all steps
    tokens_in_flight: float = 0.0  # at the end


@dataclass(eq=False)
class _Group:
    lengths: Sequence[int]
    worker: Server
    left: int
    oldest: int | None = None  # policy version of its first token


class _InFlight:
    """Counts of sequences by engine. The least count is updated with each change, so it need not be searched."""

    def __init__(self, engines: int) -> None:
        self._of = [0] * engines
        self._engines_with = [engines]  # by how many they have
        self._least = 0

    def engine(self, preferred: int) -> int:
        """Return the engine for the next sequence, and count the sequence as its own."""
        at = self._of.index(self._least) if self._of[preferred] - self._least > MORE_ALLOWED else preferred
        had = self._of[at]
        self._of[at] = had + 1
        self._engines_with[had] -= 1
        if had + 1 == len(self._engines_with):
            self._engines_with.append(0)
        self._engines_with[had + 1] += 1
        if had == self._least and not self._engines_with[had]:
            self._least += 1
        return at

    def ended(self, at: int) -> None:
        had = self._of[at]
        self._of[at] = had - 1
        self._engines_with[had] -= 1
        self._engines_with[had - 1] += 1
        self._least = min(self._least, had - 1)


@dataclass
class _Totals:
    at: float = 0.0
    groups: int = 0
    tokens: int = 0
    trained_s: float = 0.0
    published_s: float = 0.0
    stale: int = 0
    engine_busy_s: float = 0.0
    engine_tokens: float = 0.0
    sequence_seconds: float = 0.0
    hub_busy_s: float = 0.0
    worker_busy_s: list[float] = field(default_factory=list)


class Loop:
    """One simulated run."""

    def __init__(self, figures: Figures, fleet: ClusterSize, seed: int = 0) -> None:
        run, engine = figures.run, figures.engine
        self.clock = Clock()
        self.engines = [
            Engine(self.clock, engine.step_s, engine.sequence_s, engine.max_sequences) for _ in range(fleet.engines)
        ]
        turn_s = figures.worker.rollout_s / figures.rollout.turns
        self.workers = [Server(self.clock, lambda: turn_s) for _ in range(fleet.workers)]
        self.hub = Server(self.clock, lambda: figures.hub.group_s, figures.hub.servers)
        self._figures, self._run, self._fleet = figures, run, fleet
        self._random = random.Random(seed)
        self._in_flight = _InFlight(fleet.engines)
        self._leasing = False
        self._waiting: deque[_Group] = deque()
        self._running = 0
        self._started = 0
        self._version = 0
        self._arrived = Gate(self.clock)
        self._totals = _Totals()
        self._requested = 0
        self._marks: list[_Totals] = []

    def outcome(self, steps: int, skipped: int) -> Outcome:
        """Simulate `steps` steps, and return the outcome of those after the first `skipped`."""
        self.clock.run(self._steps(steps))
        first, last = self._marks[skipped], self._marks[-1]
        seconds, counted = last.at - first.at, steps - skipped
        busy, sequences = last.engine_busy_s - first.engine_busy_s, last.sequence_seconds - first.sequence_seconds
        groups, stale, engines = last.groups - first.groups, last.stale - first.stale, self._fleet.engines
        decoded = last.engine_tokens - first.engine_tokens
        workers = [after - before for before, after in zip(first.worker_busy_s, last.worker_busy_s, strict=True)]
        return Outcome(
            fleet=self._fleet,
            steps=counted,
            step_s=seconds / counted,
            trajectories_per_s=groups * self._run.group_size / seconds,
            tokens_per_s=(last.tokens - first.tokens) / seconds,
            engine_idle=1 - busy / (seconds * engines),
            engine_load=decoded / (seconds * engines * self._figures.engine.peak_tokens_per_s),
            sequences=sequences / busy if busy else 0.0,
            trainer_idle=1 - (last.trained_s - first.trained_s) / seconds,
            publishing=(last.published_s - first.published_s) / seconds,
            hub_busy=(last.hub_busy_s - first.hub_busy_s) / (seconds * self.hub.servers),
            worker_busy=max(workers, default=0.0) / seconds,
            stale_share=stale / (groups + stale) if groups + stale else 0.0,
            tokens_in=self._requested,
            tokens_out=sum(one.tokens for one in self.engines),
            tokens_in_flight=sum(one.left for one in self.engines),
        )

    # -- the loop

    def _steps(self, steps: int) -> Process:
        run, figures = self._run, self._figures
        self._mark()
        for _ in range(steps):
            kept: list[_Group] = []
            for _ in range(1 + run.refill_rounds):
                missing = run.groups_per_step - len(kept)
                if missing <= 0:
                    break
                self._want(missing + run.max_staleness * run.groups_per_step)
                self._leasing = True
                self._drop_stale()
                while len(self._waiting) < missing:
                    yield self._arrived
                self._leasing = False
                leased = [self._waiting.popleft() for _ in range(missing)]
                self._totals.groups += missing
                self._totals.tokens += sum(sum(group.lengths) for group in leased)
                kept += [group for group in leased if self._random.random() < run.kept_share]
                yield figures.loop.group_s * missing
            if kept:
                training = figures.trainer.step_s + figures.trainer.token_s * sum(sum(group.lengths) for group in kept)
                yield training
                self._totals.trained_s += training
                yield from self._publish()
            yield figures.loop.step_s
            self._mark()

    def _publish(self) -> Process:
        for engine in self.engines:
            engine.pause()
        seconds = self._figures.bridge.seconds(len(self.engines))
        yield seconds
        self._version += 1
        self._totals.published_s += seconds
        for engine in self.engines:
            engine.resume()

    def _is_stale(self, group: _Group) -> bool:
        return group.oldest is not None and group.oldest < self._version - self._run.max_staleness

    def _drop_stale(self) -> None:
        """Drop groups that are too old, as a lease does, and begin another group for each."""
        stale = [group for group in self._waiting if self._is_stale(group)]
        if stale:
            self._waiting = deque(group for group in self._waiting if not self._is_stale(group))
        for _ in stale:
            self._totals.stale += 1
            self._begin()

    # -- rollouts

    def _want(self, groups: int) -> None:
        for _ in range(groups - len(self._waiting) - self._running):
            self._begin()

    def _begin(self) -> None:
        size, tokens = self._run.group_size, self._figures.rollout.tokens
        lengths = self._random.choices(tokens, k=size)
        group = _Group(lengths, self.workers[self._started % len(self.workers)], size)
        self._started += 1
        self._running += 1
        engine = self._random.randrange(len(self.engines))  # shared by the group's rollouts, like their prompt
        for length in lengths:
            self._turn(group, length, self._figures.rollout.turns, engine)

    def _turn(self, group: _Group, length: int, left: int, preferred: int) -> None:
        """Simulate the next turn of a rollout that has `left` turns and `length` tokens left."""
        at = self._in_flight.engine(preferred)
        tokens = -(-length // left)
        if group.oldest is None:
            group.oldest = self._version
        self._requested += tokens

        def sampled() -> None:
            self._in_flight.ended(at)
            self._busy_with(group, lambda: self._after_turn(group, length - tokens, left - 1))

        self.engines[at].sample(tokens, sampled)

    def _busy_with(self, group: _Group, then: Event) -> None:
        group.worker.serve(lambda: self.clock.after(self._figures.rollout.environment_s, then))

    def _after_turn(self, group: _Group, length: int, left: int) -> None:
        if left:
            self._turn(group, length, left, self._random.randrange(len(self.engines)))
            return
        group.left -= 1
        if not group.left:
            self.hub.serve(lambda: self._put(group))

    def _put(self, group: _Group) -> None:
        self._running -= 1
        if self._leasing and self._is_stale(group):
            self._totals.stale += 1
            self._begin()
            return
        self._waiting.append(group)
        self._arrived.open()

    # -- keeping count

    def _mark(self) -> None:
        """Record the totals at the end of a step."""
        for engine in self.engines:
            engine.settle_accounts()
        totals = self._totals
        self._marks.append(
            _Totals(
                self.clock.now, totals.groups, totals.tokens, totals.trained_s, totals.published_s, totals.stale,
                sum(one.busy_s for one in self.engines), sum(one.tokens for one in self.engines),
                sum(one.sequence_seconds for one in self.engines), self.hub.busy_s, [one.busy_s for one in self.workers],
            )
        )  # fmt: skip


def simulate(figures: Figures, fleet: ClusterSize, *, rollouts: int = 100_000, seed: int = 0) -> Outcome:
    """Simulate about `rollouts` rollouts, but no more than 60 counted steps.

    The first `1 + max_staleness` steps, until the loop runs evenly, are not counted. At least the same number of steps is
    counted, even if that exceeds these limits."""
    run = figures.run
    skipped = 1 + run.max_staleness
    steps = max(2 * skipped, min(skipped + 60, rollouts // (run.groups_per_step * run.group_size)))
    with without_collector():
        return Loop(figures, fleet, seed).outcome(steps, skipped)

"""A curriculum that learns from outcomes: it draws, records how draws were settled, and keeps the state to continue from."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from atropos_core.advantages import is_flat
from atropos_core.interfaces import Curriculum, Outcome, TaskSource
from atropos_core.rollouts.task_weights import with_weight
from atropos_core.seeds import derive
from atropos_core.types import Draw, Metrics, ScoredGroup
from atropos_curriculum.bank import Bank
from atropos_curriculum.chance import uniforms
from atropos_curriculum.config import CurriculumOptions, LearningProgressOptions
from atropos_curriculum.outcome import evidence_of
from atropos_curriculum.reading import read_ahead, read_prior
from atropos_curriculum.strategies import Strategy
from atropos_curriculum.tally import Tally

TRIES = 8  # to find a task that is not being run already; the last one is used in any case
SLOW = 0.2  # rate of the slow average, if the curriculum does not use it


class AdaptiveCurriculum(Curriculum):
    """Between two settled draws, draw number i is the same however many are requested at once. A draw that was handed out
    but never settled, because the run died, is handed out again first. If nothing runs its environment now, or the
    environment has fewer tasks, it waits until something does."""

    def __init__(self, seed: int, options: CurriculumOptions, strategy: Strategy) -> None:
        self._seed, self._options, self._strategy = seed, options, strategy
        self._key = derive(seed, "curriculum")
        self._sources: dict[str, TaskSource] = {}
        self._banks: dict[str, Bank] = {}
        self._read: set[str] = set()  # environments whose prior is in the bank
        self._next = 0
        self._settled = 0
        self._open: dict[int, tuple[Draw, float]] = {}  # handed out but not settled, with their expected success
        self._again: list[tuple[Draw, float]] = []
        self._busy: Counter[tuple[str, int]] = Counter()  # tasks of open draws
        self._tally = Tally()
        self._snapshot = ""  # the small part of the state

    def open(self, sources: Mapping[str, TaskSource]) -> None:
        self._sources = with_weight(sources)
        for name, source in self._sources.items():
            bank = self._bank(name, source.size)
            if resized := bank.size != source.size:
                bank.resize(source.size)
            if self._options.prior and (resized or name not in self._read):
                read_prior(self._options.prior, name, source, bank, anew=resized)
                self._read.add(name)

    # -- draws

    def draw(self, n: int) -> list[Draw]:
        if not n:
            return []
        there = {name: source.size for name, source in self._sources.items()}
        again = [one for one in self._again if one[0].index < there.get(one[0].environment, 0)][:n]
        for draw, _ in again:
            self._busy[draw.environment, draw.index] += 1
        taken = {draw.id for draw, _ in again}
        self._again = [one for one in self._again if one[0].id not in taken]
        drawn = again + (self._new(n - len(again)) if n > len(again) else [])
        self._open |= {one[0].id: one for one in drawn}
        self._tally.drawn([draw.environment for draw, _ in drawn], [expected for _, expected in drawn])
        return [draw for draw, _ in drawn]

    def settle(self, draw: Draw, outcome: Outcome, group: ScoredGroup | None) -> None:
        """Learn how hard the task is from the rollouts that ended, whatever the outcome of the draw."""
        draw, expected = self._open.pop(draw.id)
        self._free(draw)
        self._settled += 1
        bank, source = self._banks[draw.environment], self._sources.get(draw.environment)
        if group is not None and draw.index < bank.size and (evidence := evidence_of(group, self._options)):
            bank.learn(draw.index, evidence.success, evidence.rollouts)
            flat = is_flat(group.rewards)
            self._tally.settled(expected, evidence.success, flat=flat, clipped=evidence.clipped)
        if self._options.prior and source is not None:
            read_ahead(self._options.prior, draw.environment, source, bank)

    def metrics(self) -> Metrics:
        """`expected`, `pool` and the strategy's own metrics are of all environments together, weighted as they are drawn."""
        metrics = self._tally.take()
        total = sum(source.weight for source in self._sources.values())
        sums: Counter[str] = Counter()
        for name, source in self._sources.items():
            view = self._banks[name].view(self._settled)
            shares = self._strategy.shares(view)
            there = view.counts > 0
            pool = 1 / float((shares[there] ** 2 / view.counts[there]).sum())
            tried = min(self._banks[name].tried / self._banks[name].size, 1.0)
            own = {"pool": pool, "tried": tried, **self._strategy.metrics(view)}
            if len(self._sources) > 1:
                metrics |= {f"{key}/{name}": value for key, value in own.items()}
            for key, value in own.items():
                sums[key] += value if key == "pool" else value * source.weight / total  # type: ignore[assignment]
        return metrics | {key: float(value) for key, value in sums.items()}

    @property
    def size_bytes(self) -> int:
        """Size of what is kept for every task."""
        return sum(bank.size_bytes for bank in self._banks.values())

    # -- state

    def state(self) -> Mapping[str, Any]:
        return self._with_columns(self._small(), at_snapshot=False)

    def take_snapshot(self) -> None:
        self._snapshot = json.dumps(self._small())
        for bank in self._banks.values():
            bank.take_snapshot()

    def snapshot(self) -> Mapping[str, Any]:
        if not self._snapshot:
            raise RuntimeError("snapshot() before any take_snapshot()")
        return self._with_columns(json.loads(self._snapshot), at_snapshot=True)

    def load(self, state: Mapping[str, Any]) -> None:
        """Load the state, also that of another of the five: the estimates stay, and this curriculum chooses by them."""
        self._next, self._settled = int(state["next"]), int(state["settled"])
        self._again = [
            (Draw(int(number), str(name), "train", int(at), int(seed)), float(expected))
            for number, name, _, at, seed, expected in state["unsettled"]
        ]
        self._open.clear()
        self._busy.clear()
        self._tally = Tally(state["step"])
        same_prior = state["prior"] == self._prior()
        for name, saved in state["banks"].items():
            self._bank(name, int(saved["size"])).load(saved, same_prior=same_prior)

    def _small(self) -> dict[str, Any]:
        unsettled = sorted([*self._open.values(), *self._again], key=lambda one: one[0].id)
        return {
            "next": self._next,
            "settled": self._settled,
            "unsettled": [[d.id, d.environment, d.split, d.index, d.seed, expected] for d, expected in unsettled],
            "step": dict(self._tally.sums),
            "prior": self._prior(),
            "banks": {name: bank.summary() for name, bank in self._banks.items()},
        }

    def _with_columns(self, small: dict[str, Any], *, at_snapshot: bool) -> Mapping[str, Any]:
        groups = self._options.prior is not None and self._options.prior.field is not None  # a file is read again
        for name, bank in small["banks"].items():
            bank |= self._banks[name].columns(at_snapshot=at_snapshot, groups=groups)
        return small

    def _prior(self) -> Any:
        return self._options.prior.model_dump(mode="json") if self._options.prior else None

    # -- inside

    def _bank(self, name: str, size: int) -> Bank:
        """The environment's bank; a new one has this size."""
        if name not in self._banks:
            options = self._options
            slow = options.slow if isinstance(options, LearningProgressOptions) else SLOW
            self._banks[name] = Bank(
                size,
                self._strategy,
                memory=options.memory,
                prior_weight=options.prior_weight,
                slow=slow,
                by_bin=self._strategy.by_progress and options.prior is not None,
            )
        return self._banks[name]

    def _new(self, n: int) -> list[tuple[Draw, float]]:
        numbers = np.arange(self._next, self._next + n)
        self._next += n
        names = list(self._sources)
        at = self._environments(numbers, names)
        drawn: list[tuple[Draw, float]] = [None] * n  # type: ignore[list-item]  # all are filled below
        for which, name in enumerate(names):
            mine = np.flatnonzero(at == which)
            if not len(mine):
                continue
            bank = self._banks[name]
            shares = self._strategy.shares(bank.view(self._settled))
            first = bank.draw(shares, uniforms(self._key, numbers[mine], 1), uniforms(self._key, numbers[mine], 2))
            chosen = []
            for number, index in zip(numbers[mine].tolist(), first.tolist(), strict=True):
                chosen.append(self._free_task(name, bank, shares, number, index))
                self._busy[name, chosen[-1]] += 1
            expected = bank.success(np.array(chosen)).tolist()
            for place, index, success in zip(mine.tolist(), chosen, expected, strict=True):
                number = self._next - n + place
                drawn[place] = (Draw(number, name, "train", index, derive(self._seed, "draw", number)), success)
        return drawn

    def _environments(self, numbers: NDArray[np.int64], names: list[str]) -> NDArray[np.int64]:
        """The environment of each draw, by weight."""
        sums = np.cumsum([self._sources[name].weight for name in names])
        at = np.searchsorted(sums, uniforms(self._key, numbers, 0) * sums[-1], side="right")
        return np.asarray(np.minimum(at, len(names) - 1), np.int64)

    def _free_task(self, name: str, bank: Bank, shares: NDArray[np.float64], number: int, index: int) -> int:
        """The task, or another one if it is already being run."""
        if (name, index) not in self._busy:
            return index
        positions, tries = np.full(TRIES - 1, number), np.arange(1, TRIES)
        one, other = (uniforms(self._key, positions, 2 * tries + which) for which in (1, 2))
        candidates: list[int] = bank.draw(shares, one, other).tolist()
        return next((index for index in candidates if (name, index) not in self._busy), candidates[-1])

    def _free(self, draw: Draw) -> None:
        place = (draw.environment, draw.index)
        self._busy[place] -= 1
        if not self._busy[place]:
            del self._busy[place]

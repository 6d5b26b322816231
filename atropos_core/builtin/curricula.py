"""Curricula: every task once an epoch, in order or shuffled; environments mixed by weight."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from atropos_core.interfaces import Curriculum, Outcome, TaskSource
from atropos_core.rollouts.task_weights import with_weight
from atropos_core.seeds import derive
from atropos_core.types import Draw, ScoredGroup


class OrderedCurriculum(Curriculum):
    """Draw number i is the same in every run with one seed, whenever and in whichever process it is requested.

    A draw that was handed out but not settled, because the run died, is handed out again first. If nothing runs its environment at
    that time, or the environment has fewer tasks, it waits until something does.
    """

    def __init__(self, seed: int, *, shuffled: bool) -> None:
        self._seed = seed
        self._shuffled = shuffled
        self._sources: dict[str, TaskSource] = {}
        self._next = 0
        self._drawn: dict[str, int] = {}  # draws so far, by environment
        self._open: dict[int, Draw] = {}  # handed out, not settled
        self._again: list[Draw] = []
        self._orders: dict[str, tuple[int, np.ndarray[Any, np.dtype[np.int64]]]] = {}  # environment -> epoch, order

    def open(self, sources: Mapping[str, TaskSource]) -> None:
        self._sources = with_weight(sources)
        self._drawn = {**dict.fromkeys(self._sources, 0), **self._drawn}
        self._orders.clear()  # a source may have another size than before

    def draw(self, n: int) -> list[Draw]:
        again = [draw for draw in self._again if self._is_there(draw)][:n]
        for draw in again:
            self._again.remove(draw)
        drawn = again + [self._new() for _ in range(n - len(again))]
        self._open |= {draw.id: draw for draw in drawn}
        return drawn

    def _is_there(self, draw: Draw) -> bool:
        return draw.environment in self._sources and draw.index < self._sources[draw.environment].size

    def settle(self, draw: Draw, outcome: Outcome, group: ScoredGroup | None) -> None:
        del self._open[draw.id]

    def state(self) -> Mapping[str, Any]:
        unsettled = sorted([*self._open.values(), *self._again], key=lambda draw: draw.id)
        return {
            "next": self._next,
            "drawn": dict(self._drawn),
            "unsettled": [[d.id, d.environment, d.split, d.index, d.seed] for d in unsettled],
        }

    def load(self, state: Mapping[str, Any]) -> None:
        self._next = int(state["next"])
        self._drawn = {**self._drawn, **{name: int(count) for name, count in state["drawn"].items()}}
        self._again = [
            Draw(int(number), str(name), "train", int(at), int(seed))
            for number, name, _, at, seed in state["unsettled"]
        ]

    def _new(self) -> Draw:
        number = self._next
        self._next += 1
        name = self._pick(number)
        count = self._drawn[name]
        self._drawn[name] = count + 1
        epoch, at = divmod(count, self._sources[name].size)
        index = int(self._order(name, epoch)[at]) if self._shuffled else at
        return Draw(number, name, "train", index, derive(self._seed, "draw", number))

    def _pick(self, number: int) -> str:
        names = list(self._sources)
        if len(names) == 1:
            return names[0]
        weights = np.array([self._sources[name].weight for name in names], np.float64)
        at = derive(self._seed, "environment", number) / 2**63 * weights.sum()
        return names[min(int(np.searchsorted(np.cumsum(weights), at, side="right")), len(names) - 1)]

    def _order(self, name: str, epoch: int) -> np.ndarray[Any, np.dtype[np.int64]]:
        if self._orders.get(name, (-1, None))[0] != epoch:
            rng = np.random.Generator(np.random.Philox(key=derive(self._seed, "order", name, epoch)))
            self._orders[name] = (epoch, rng.permutation(self._sources[name].size))
        return self._orders[name][1]

"""Estimates for the tasks of one environment: one for each task that was tried, and one for each prior bin."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from atropos_curriculum.base64_columns import packed, unpacked
from atropos_curriculum.config import GROUPS
from atropos_curriculum.strategies import Strategy, View
from atropos_curriculum.tree import CellTree

NO_PRIOR = GROUPS  # the bin of tasks without a prior
BINS = GROUPS + 1
BIN_WEIGHT = 8.0  # number of rollouts for which a bin's guessed success counts
BIN_MEMORY = 0.95  # share of a bin's evidence that remains after the next task is first tried
BIN_SLOW = 0.02  # rate of its slow average
UNKNOWN_PROGRESS = 0.1  # progress of a bin of which little was tried
COLUMNS: Mapping[str, Any] = {"mean": np.float32, "weight": np.float32, "slow": np.float32}

Row = tuple[float, float, float, int, int]  # mean, weight, slow, group, cell


class Bank:
    """Success of a task is estimated as a Beta-Bernoulli mean with discounted evidence: (k m + w x) / (k + w), for the
    discounted mean x of w rollouts and the success m of its bin, counted as k rollouts. Memory is 24 bytes per task; untouched
    pages cost nothing."""

    def __init__(
        self, size: int, strategy: Strategy, *, memory: float, prior_weight: float, slow: float, by_bin: bool
    ) -> None:
        self.tried = 0  # tasks
        self.read = 0  # tasks whose prior was looked at
        self.edges: NDArray[np.float64] | None = None  # of the prior's bins
        self._strategy, self._memory, self._prior_weight, self._rate = strategy, memory, prior_weight, slow
        self._by_bin = by_bin  # tasks always keep the estimate of their bin, and each visit updates the bin
        self._mean = np.zeros(size, np.float32)  # of the rollouts' success, discounted
        self._weight = np.zeros(size, np.float32)  # rollouts, discounted; 0: never tried
        self._slow = np.zeros(size, np.float32)  # slow average of success
        self._group = np.full(size, NO_PRIOR, np.uint8)  # bin of the prior
        self._bins = np.zeros((5, BINS))  # each bin's guess, mean, weight, slow, visits: of tasks when first tried
        self._bins[0] = 0.5
        self._before: dict[int, Row] = {}  # old values of the rows that have changed since `take_snapshot`
        self._levels = len(strategy.edges) + 1
        marks = np.array([0.0, *strategy.edges, 1.0])
        self._middles = (marks[1:] + marks[:-1]) / 2
        self._beyond = np.zeros(0, np.uint8)  # cells of tasks that no longer exist, at the end of the columns
        self._plant(self._group + np.uint8(self._levels), size)

    @property
    def size(self) -> int:
        return self._tree.size

    @property
    def size_bytes(self) -> int:
        return self._tree.size_bytes + sum(c.nbytes for c in (self._mean, self._weight, self._slow, self._group))

    def resize(self, size: int) -> None:
        """Change the number of tasks. Estimates of tasks beyond the new size are kept, in case they come back."""
        had, cells = len(self._mean), self._all_cells()
        if size > had:
            for name, fill in (("_mean", 0), ("_weight", 0), ("_slow", 0), ("_group", NO_PRIOR)):
                column = getattr(self, name)
                setattr(self, name, np.concatenate([column, np.full(size - had, fill, column.dtype)]))
            cells = np.concatenate([cells, np.full(size - had, self._levels + NO_PRIOR, np.uint8)])
        self._plant(cells, size)

    # -- estimates

    def success(self, indices: NDArray[np.int64]) -> NDArray[np.float64]:
        """Estimated success of these tasks."""
        known, weight = self._bin_success()[self._group[indices]], self._weight[indices].astype(np.float64)
        mean = self._mean[indices].astype(np.float64)
        return np.asarray((self._prior_weight * known + weight * mean) / (self._prior_weight + weight))

    def learn(self, index: int, success: float, rollouts: int) -> None:
        """Record that `rollouts` of the task had this mean success."""
        self._touch(index)
        first = self._weight[index] == 0
        if first:
            self.tried += 1
            self._slow[index] = success
        if first or self._by_bin:
            self._learn_bin(int(self._group[index]), success, rollouts)
        weight = float(self._weight[index]) * self._memory
        mean = (weight * float(self._mean[index]) + rollouts * success) / (weight + rollouts)
        self._mean[index], self._weight[index] = mean, weight + rollouts
        slow = float(self._slow[index])
        self._slow[index] = slow + self._rate * (success - slow)
        if not self._by_bin:
            self._tree.move(index, self._level(index))

    def place(self, indices: NDArray[np.int64], groups: NDArray[np.uint8]) -> None:
        """Set the bins of these tasks by their priors. Few are moved one by one; for many the tree is rebuilt."""
        if len(indices) > 64:
            cells = self._all_cells()
            untried = indices if self._by_bin else indices[self._weight[indices] == 0]
            self._group[indices] = groups
            cells[untried] = self._group[untried] + np.uint8(self._levels)
            self._plant(cells, self.size)
            return
        for index, group in zip(indices.tolist(), groups.tolist(), strict=True):
            self._touch(index)
            self._group[index] = group
            if self._by_bin or self._weight[index] == 0:
                self._tree.move(index, self._levels + group)

    def guess(self, success: NDArray[np.float64]) -> None:
        """Set the guessed success of the bins, before any of their tasks was tried."""
        self._bins[0, : len(success)] = success

    # -- draws

    def view(self, settled: int) -> View:
        levels, bins = np.full(self._levels, np.nan), self._bin_success()
        own = self._middles
        success, progress = (levels, own) if self._strategy.by_progress else (own, levels)
        tried = np.arange(self._levels + BINS) < self._levels
        return View(
            counts=self._tree.counts,
            success=np.concatenate([success, bins]),
            progress=np.concatenate([progress, self._bin_progress()]),
            tried=tried,
            settled=settled,
            prior=self.edges is not None,
        )

    def draw(
        self, shares: NDArray[np.float64], one: NDArray[np.float64], other: NDArray[np.float64]
    ) -> NDArray[np.int64]:
        """A task for each pair of numbers in [0, 1): the first chooses a cell, the second a task in it."""
        sums = np.cumsum(shares)
        last = int(np.flatnonzero(shares)[-1])
        cells = np.minimum(np.searchsorted(sums, one * sums[-1], side="right"), last)
        counts = self._tree.counts[cells]
        ranks = np.minimum((other * counts).astype(np.int64), counts - 1)
        return self._tree.find(cells, ranks)

    # -- state

    def take_snapshot(self) -> None:
        self._before.clear()

    def summary(self) -> dict[str, Any]:
        """The small part of the state, as JSON."""
        edges = None if self.edges is None else self.edges.tolist()
        return {"read": self.read, "edges": edges, "bins": self._bins.tolist()}

    def columns(self, *, at_snapshot: bool = False, groups: bool) -> dict[str, Any]:
        """The large part of the state, now or at the last snapshot. With `groups`, it includes the bins of all tasks."""
        if not at_snapshot:
            return self._columns(groups)
        self._swap()
        try:
            return self._columns(groups)
        finally:
            self._swap()

    def load(self, state: Mapping[str, Any], *, same_prior: bool) -> None:
        """Load what `summary` and `columns` gave. If there are more tasks now, the new ones are untried; if fewer, the estimates
        of the others are kept. If the prior has changed, the bins stay as they are now."""
        size, rows, now = int(state["size"]), state["rows"], self.size
        if size > len(self._mean):
            self.resize(size)
        index = np.arange(size) if state["index"] is None else unpacked(state["index"], np.int64)
        for name, dtype in COLUMNS.items():
            column = getattr(self, f"_{name}")
            column[:] = 0
            column[index] = unpacked(rows[name], dtype)
        if same_prior:
            self.read, self._bins = int(state["read"]), np.array(state["bins"], np.float64)
            self.edges = None if state["edges"] is None else np.array(state["edges"])
            if state["group"] is not None:
                raw = zlib.decompress(unpacked(state["group"], np.uint8).tobytes())
                self._group[:size] = np.frombuffer(raw, np.uint8)
        cells = self._group + np.uint8(self._levels)
        tried = np.flatnonzero(self._weight)
        self.tried = len(tried)
        if self._by_bin:
            pass
        elif state["levels"] == self._strategy.edges.tolist() and state["by_progress"] == self._strategy.by_progress:
            saved = np.zeros(len(cells), np.uint8)
            saved[index] = unpacked(rows["cell"], np.uint8)
            cells[tried] = saved[tried]
        else:  # saved by another curriculum
            cells[tried] = self._levels_of(tried)
        self._plant(cells, now)
        self._before.clear()

    def _columns(self, groups: bool) -> dict[str, Any]:
        tried = np.flatnonzero(self._weight)
        dense = 21 * len(tried) > 13 * len(self._mean)  # bytes a task, with its number and without
        rows = slice(None) if dense else tried
        return {
            "size": len(self._mean),
            "index": None if dense else packed(tried.astype(np.int64)),
            "rows": {
                **{name: packed(getattr(self, f"_{name}")[rows]) for name in COLUMNS},
                "cell": packed(self._all_cells()[rows]),
            },
            "group": packed(np.frombuffer(zlib.compress(self._group.tobytes(), 1), np.uint8)) if groups else None,
            "levels": None if self._by_bin else self._strategy.edges.tolist(),
            "by_progress": self._strategy.by_progress,
        }

    # -- inside

    def _plant(self, cells: NDArray[np.uint8], size: int) -> None:
        self._tree, self._beyond = CellTree(cells[:size], self._levels + BINS), cells[size:].copy()

    def _all_cells(self) -> NDArray[np.uint8]:
        return np.concatenate([self._tree.cells, self._beyond])

    def _bin_success(self) -> NDArray[np.float64]:
        guess, mean, weight, *_ = self._bins
        return np.asarray((BIN_WEIGHT * guess + weight * mean) / (BIN_WEIGHT + weight))

    def _bin_progress(self) -> NDArray[np.float64]:
        _, mean, weight, slow, _ = self._bins
        return np.asarray((BIN_WEIGHT * UNKNOWN_PROGRESS + weight * np.abs(mean - slow)) / (BIN_WEIGHT + weight))

    def _learn_bin(self, group: int, success: float, rollouts: int) -> None:
        _, mean, weight, slow, visits = self._bins[:, group].tolist()
        slow += max(BIN_SLOW, 1 / (visits + 1)) * (success - slow)  # at first the plain mean
        weight *= BIN_MEMORY
        mean = (weight * mean + rollouts * success) / (weight + rollouts)
        self._bins[1:, group] = mean, weight + rollouts, slow, visits + 1

    def _level(self, index: int) -> int:
        return int(self._levels_of(np.array([index]))[0])

    def _levels_of(self, indices: NDArray[np.int64]) -> NDArray[np.uint8]:
        if not self._strategy.by_progress:
            value = self.success(indices)
        else:
            known, weight = self._bin_progress()[self._group[indices]], self._weight[indices].astype(np.float64)
            change = np.abs(self._mean[indices].astype(np.float64) - self._slow[indices])
            value = (self._prior_weight * known + weight * change) / (self._prior_weight + weight)
        return np.searchsorted(self._strategy.edges, value, side="left").astype(np.uint8)

    def _row(self, index: int) -> Row:
        cell = self._tree.cells[index] if index < self.size else self._beyond[index - self.size]
        return (
            float(self._mean[index]),
            float(self._weight[index]),
            float(self._slow[index]),
            int(self._group[index]),
            int(cell),
        )

    def _touch(self, index: int) -> None:
        if index not in self._before:
            self._before[index] = self._row(index)

    def _swap(self) -> None:
        """Exchange the rows that have changed since the snapshot with their values then. The tree's counts stay."""
        for index, before in self._before.items():
            self._before[index] = self._row(index)
            self._mean[index], self._weight[index], self._slow[index], self._group[index], cell = before
            if index < self.size:
                self._tree.cells[index] = cell
            else:
                self._beyond[index - self.size] = cell

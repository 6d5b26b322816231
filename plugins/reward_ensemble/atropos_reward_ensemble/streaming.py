"""Alpha during a run: over everything so far, in bounded memory, and over a window.

Interval needs five numbers, for any ratings. Nominal, ordinal and ratio need to know which values occurred: a coincidence
matrix of at most `categories` different values, O(categories^2). With more values, there is no overall alpha from then on
(NaN), only the window's: a sum over all pairs of different values cannot be kept in bounded memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from atropos_reward_ensemble.alpha import alpha_and_agreement, alpha_of, coincidences, interval_alpha, interval_sums
from atropos_reward_ensemble.config import Metric
from atropos_reward_ensemble.missing import Ratings


class Moments:
    """The interval metric. Parts are merged as in Chan, Golub and LeVeque (1979)."""

    def __init__(self) -> None:
        self._count, self._mean, self._scatter, self._within = 0, 0.0, 0.0, 0.0

    def add(self, ratings: Ratings) -> None:
        within, scatter, count = interval_sums(ratings)
        if not count:
            return
        pairable = ratings[:, (~np.isnan(ratings)).sum(axis=0) >= 2]
        apart = float(np.nanmean(pairable)) - self._mean
        total = self._count + count
        self._scatter += scatter + apart**2 * self._count * count / total
        self._mean += apart * count / total
        self._within += within
        self._count = total

    def alpha(self) -> float:
        return interval_alpha(self._within, self._scatter, self._count)

    def state(self) -> dict[str, Any]:
        return {"count": self._count, "mean": self._mean, "scatter": self._scatter, "within": self._within}

    def load(self, state: Mapping[str, Any]) -> None:
        self._count, self._mean = int(state["count"]), float(state["mean"])
        self._scatter, self._within = float(state["scatter"]), float(state["within"])


class Coincidences:
    """The other metrics."""

    def __init__(self, metric: Metric, categories: int) -> None:
        self.full = False  # more than `categories` values occurred: counting has ended
        self._metric: Metric = metric
        self._categories = categories
        self._values = np.zeros(0)
        self._matrix = np.zeros((0, 0))

    def add(self, ratings: Ratings) -> None:
        if self.full:
            return
        values, matrix = coincidences(ratings)
        all_values = np.union1d(self._values, values)
        if len(all_values) > self._categories:
            self.full, self._values, self._matrix = True, np.zeros(0), np.zeros((0, 0))
            return
        summed = np.zeros((len(all_values), len(all_values)))
        for known, counted in ((self._values, self._matrix), (values, matrix)):
            at = np.searchsorted(all_values, known)
            summed[np.ix_(at, at)] += counted
        self._values, self._matrix = all_values, summed

    def alpha(self) -> float:
        return float("nan") if self.full else alpha_of(self._values, self._matrix, self._metric)

    def state(self) -> dict[str, Any]:
        return {"full": self.full, "values": self._values.tolist(), "matrix": self._matrix.tolist()}

    def load(self, state: Mapping[str, Any]) -> None:
        self.full, self._values = bool(state["full"]), np.array(state["values"], np.float64)
        self._matrix = np.array(state["matrix"], np.float64).reshape(len(self._values), len(self._values))


class Reliability:
    """Agreement of R raters: overall, and over the last `window` units, also for each rater."""

    def __init__(self, raters: int, metric: Metric = "interval", *, categories: int = 64, window: int = 256) -> None:
        self._metric: Metric = metric
        self._window = window
        self._overall: Moments | Coincidences = Moments() if metric == "interval" else Coincidences(metric, categories)
        self._latest = np.zeros((raters, 0))  # [R, up to window]

    def add(self, ratings: Ratings) -> None:
        """Take in ratings [R, U]; NaN is a missing one."""
        self._overall.add(ratings)
        self._latest = np.concatenate([self._latest, ratings], axis=1)[:, -self._window :]

    @property
    def full(self) -> bool:
        """True if the overall alpha has seen more different ratings than it can count."""
        return isinstance(self._overall, Coincidences) and self._overall.full

    def alpha(self) -> float:
        return self._overall.alpha()

    def rolling(self) -> tuple[float, Ratings]:
        """Alpha over the window, and each rater's agreement with the others there, [R]."""
        return alpha_and_agreement(self._latest, self._metric)

    def state(self) -> dict[str, Any]:
        latest = [[None if np.isnan(value) else float(value) for value in row] for row in self._latest]
        return {"overall": self._overall.state(), "latest": latest}

    def load(self, state: Mapping[str, Any]) -> None:
        self._overall.load(state["overall"])
        latest = [[np.nan if value is None else value for value in row] for row in state["latest"]]
        self._latest = np.array(latest, np.float64).reshape(len(latest), -1)

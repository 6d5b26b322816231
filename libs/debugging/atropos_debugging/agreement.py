"""Agreement between two scores of the same rollouts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Values = NDArray[np.float32]  # [n]
SAME = 1e-6  # relative to the larger of two rewards, or to 1: eight times what float32 rounds by


@dataclass(frozen=True)
class Agreement:
    """Agreement of n rollouts' scores. A statistic that is not defined is NaN."""

    count: int
    changed: int  # scores that differ by more than rounding
    largest: float  # difference
    rank_correlation: float  # Spearman's rho; NaN if all scores of one side are equal
    alpha: float  # Krippendorff's, interval metric; NaN if all scores are equal

    def record(self) -> dict[str, float | int | None]:
        """Return a form for JSON, with None for NaN."""
        return {
            name: None if isinstance(value, float) and math.isnan(value) else value
            for name, value in vars(self).items()
        }


class Scores:
    """Pairs of scores, collected part by part: 8 bytes a rollout."""

    def __init__(self) -> None:
        self._before: list[Values] = []
        self._now: list[Values] = []

    def add(self, before: Sequence[float] | Values, now: Sequence[float] | Values) -> None:
        """Add scores [n] of the same rollouts. Pairs of which one is NaN are left out."""
        first, second = np.asarray(before, np.float32), np.asarray(now, np.float32)
        both = ~(np.isnan(first) | np.isnan(second))
        self._before.append(first[both])
        self._now.append(second[both])

    def agreement(self) -> Agreement:
        before = np.concatenate([np.zeros(0, np.float32), *self._before]).astype(np.float64)
        now = np.concatenate([np.zeros(0, np.float32), *self._now]).astype(np.float64)
        return Agreement(
            len(before),
            int(differs(before, now).sum()),
            float(np.abs(now - before).max(initial=0.0)),
            spearman(before, now),
            interval_alpha(before, now),
        )


def differs(before: NDArray[np.floating], now: NDArray[np.floating]) -> NDArray[np.bool_]:
    """Return a mask [n] of scores that differ by more than rounding."""
    scale = np.maximum(1.0, np.maximum(np.abs(before), np.abs(now)))
    return np.asarray(np.abs(now - before) > SAME * scale)


def spearman(before: NDArray[np.float64], now: NDArray[np.float64]) -> float:
    """Spearman's rank correlation: Pearson's correlation of the ranks, where equal values share the mean of their ranks."""
    first, second = _centred_ranks(before), _centred_ranks(now)
    scale = math.sqrt(float(first @ first) * float(second @ second))
    return float(first @ second) / scale if scale else math.nan


def interval_alpha(before: NDArray[np.float64], now: NDArray[np.float64]) -> float:
    """Krippendorff's alpha of two raters without missing ratings, with the interval metric (Krippendorff 2011):
    1 - (n - 1) / n * (sum of squared differences) / (sum of squares around the common mean), n being twice the rollouts."""
    both = np.concatenate([before, now])
    scatter = float(((both - both.mean()) ** 2).sum()) if len(both) else 0.0
    if not scatter:
        return math.nan
    return 1.0 - (len(both) - 1) / len(both) * float(((before - now) ** 2).sum()) / scatter


def _centred_ranks(values: NDArray[np.float64]) -> NDArray[np.float64]:
    _, at, counts = np.unique(values, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(counts) - (counts - 1) / 2)[at]  # from 1
    return np.asarray(ranks - ranks.mean()) if len(ranks) else ranks

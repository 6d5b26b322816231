"""Krippendorff's alpha, and each rater's share in it. Ratings are [R, U], raters by units; NaN is a missing one.

K. Krippendorff, Computing Krippendorff's Alpha-Reliability (2011): with o[c, k] the coincidences of the values c and k in
the units, n[c] their sums and n the sum of those,

    alpha = 1 - (n - 1) * sum o[c, k] delta(c, k) / sum n[c] n[k] delta(c, k)

A unit with fewer than two ratings counts for nothing. Where all ratings are equal there is nothing to agree about, and
alpha is NaN.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from atropos_reward_ensemble.config import Metric
from atropos_reward_ensemble.missing import Ratings


def alpha(ratings: Ratings, metric: Metric = "interval") -> float:
    """Interval: time and memory O(R U). The others: O(R^2 U + V^2), V being how many different ratings there are."""
    if metric == "interval":
        return interval_alpha(*interval_sums(ratings))
    return alpha_and_agreement(ratings, metric)[0]


def interval_sums(ratings: Ratings) -> tuple[float, float, int]:
    """Over units with two ratings or more: sum of m SS / (m - 1), SS being a unit's squares around its own mean and m how
    many ratings it has; the squares of all around the common mean; how many ratings there are."""
    pairable = ratings[:, (~np.isnan(ratings)).sum(axis=0) >= 2]
    there = ~np.isnan(pairable)
    many = there.sum(axis=0)
    if not many.size:
        return 0.0, 0.0, 0
    filled = np.where(there, pairable, 0.0)
    means = filled.sum(axis=0) / many
    squares = (np.where(there, pairable - means, 0.0) ** 2).sum(axis=0)
    everything = pairable[there]
    scatter = ((everything - everything.mean()) ** 2).sum()
    return float((many * squares / (many - 1)).sum()), float(scatter), int(many.sum())


def interval_alpha(within: float, scatter: float, count: int) -> float:
    """Alpha with delta = (c - k)^2, from `interval_sums`: both sums over pairs are sums of squares around a mean."""
    if count < 2 or scatter <= 0:
        return float("nan")
    return 1.0 - (count - 1) / count * within / scatter


def coincidences(ratings: Ratings) -> tuple[Ratings, Ratings]:
    """The different pairable values [V], rising, and their coincidence matrix [V, V]."""
    pairable = ratings[:, (~np.isnan(ratings)).sum(axis=0) >= 2]
    there = ~np.isnan(pairable)
    values, at = np.unique(pairable[there], return_inverse=True)
    counts = np.zeros((pairable.shape[1], len(values)))  # [U, V]
    np.add.at(counts, (np.nonzero(there)[1], at), 1.0)
    shares = counts / np.maximum(counts.sum(axis=1, keepdims=True) - 1, 1)
    return values, np.asarray(counts.T @ shares - np.diag(shares.sum(axis=0)))


def alpha_of(values: Ratings, matrix: Ratings, metric: Metric) -> float:
    """Alpha from what `coincidences` gives."""
    sums = matrix.sum(axis=0)
    apart = distances(values, sums, metric)
    expected = float(sums @ apart @ sums)
    if expected <= 0:
        return float("nan")
    return 1.0 - (float(sums.sum()) - 1.0) * float((matrix * apart).sum()) / expected


def distances(values: Ratings, sums: Ratings, metric: Metric) -> Ratings:
    """delta [V, V] between values that occur `sums` times. Ratio: 0 where two values add up to 0."""
    if metric == "nominal":
        return np.asarray(values[:, None] != values[None, :], np.float64)
    if metric == "interval":
        return np.asarray((values[:, None] - values[None, :]) ** 2)
    if metric == "ratio":
        total = values[:, None] + values[None, :]
        return np.asarray(((values[:, None] - values[None, :]) / np.where(total == 0, np.inf, total)) ** 2)
    middle = np.cumsum(sums) - sums / 2  # rank of a value's middle: sum over g = c..k of n[g], less (n[c] + n[k]) / 2
    return np.asarray((middle[:, None] - middle[None, :]) ** 2)


def alpha_and_agreement(ratings: Ratings, metric: Metric = "interval") -> tuple[float, NDArray[np.float64]]:
    """Alpha, and each rater's agreement with the others, [R]: 1 - observed / expected disagreement over the pairs that the
    rater is one of, each unit's counted as their mean. 1: as the others in everything; 0: no better than chance; NaN with
    nothing to compare. Expected is what alpha expects of all raters: with no rating missing, these average to alpha."""
    pairable = ratings[:, (~np.isnan(ratings)).sum(axis=0) >= 2]
    there = ~np.isnan(pairable)
    values, at, counts = np.unique(pairable[there], return_inverse=True, return_counts=True)
    if len(values) < 2:
        return float("nan"), np.full(len(ratings), np.nan)
    count = len(at)
    if metric == "interval":
        expected = 2 * interval_sums(ratings)[1] / (count - 1)
        apart = (pairable[:, None, :] - pairable[None, :, :]) ** 2
    else:
        sums = counts.astype(np.float64)
        between = distances(values, sums, metric)
        expected = float(sums @ between @ sums) / (count * (count - 1))
        positions = np.zeros(pairable.shape, np.int64)  # [R, U], of each rating among the values
        positions[there] = at
        apart = between[positions[:, None, :], positions[None, :, :]]
    if not expected > 0:
        return float("nan"), np.full(len(ratings), np.nan)
    means = _mean_distances(there, apart)
    units = there.sum(axis=1)
    by_rater = np.where(units > 0, means.sum(axis=1) / np.maximum(units, 1), np.nan)
    return 1.0 - float(means.sum()) / count / expected, np.asarray(1.0 - by_rater / expected)


def _mean_distances(there: NDArray[np.bool_], apart: Ratings) -> Ratings:
    """[R, U]: of each rating, the mean distance to the others of its unit, from all distances [R, R, U]; 0 where missing."""
    pairs = there[:, None, :] & there[None, :, :] & ~np.eye(len(there), dtype=bool)[:, :, None]
    others = np.maximum(there.sum(axis=0) - 1, 1)
    return np.asarray(np.where(pairs, apart, 0.0).sum(axis=1) / others)

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
    """Time and memory O(V^2) in the number of different ratings; with the interval metric O(R U)."""
    if metric == "interval":
        within, scatter, count = interval_sums(ratings)
        return interval_alpha(within, scatter, count)
    values, matrix = coincidences(ratings)
    return alpha_of(values, matrix, metric)


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


def agreement(ratings: Ratings, metric: Metric = "interval") -> NDArray[np.float64]:
    """Of each rater, [R]: 1 - observed / expected disagreement over the pairs that it is one of, each unit's counted as
    their mean. 1: as the others in everything; 0: no better than chance. NaN with nothing to compare. Expected is what
    alpha expects of all raters, so that these are alpha, by rater: with no rating missing, their mean is alpha."""
    many = (~np.isnan(ratings)).sum(axis=0)
    pairable = ratings[:, many >= 2]
    there = ~np.isnan(pairable)
    nothing = np.full(len(ratings), np.nan)
    if metric == "interval":
        _, scatter, count = interval_sums(ratings)
        if count < 2 or scatter <= 0:
            return nothing
        expected = 2 * scatter / (count - 1)
        observed = _mean_distances(pairable, there, (pairable[:, None, :] - pairable[None, :, :]) ** 2)
        return np.asarray(1.0 - observed / expected)
    values, matrix = coincidences(ratings)
    sums = matrix.sum(axis=0)
    apart = distances(values, sums, metric)
    count_all = sums.sum()
    if float(sums @ apart @ sums) <= 0:
        return nothing
    expected = float(sums @ apart @ sums) / (count_all * (count_all - 1))
    at = np.searchsorted(values, np.where(there, pairable, values[0]))  # [R, U]
    return np.asarray(1.0 - _mean_distances(pairable, there, apart[at[:, None, :], at[None, :, :]]) / expected)


def _mean_distances(pairable: Ratings, there: NDArray[np.bool_], apart: Ratings) -> Ratings:
    """[R]: over a rater's units, the mean distance [R, R, U] to the other raters that are there."""
    pairs = there[:, None, :] & there[None, :, :] & ~np.eye(len(pairable), dtype=bool)[:, :, None]
    others = pairs.sum(axis=1)  # [R, U]
    means = np.where(pairs, apart, 0.0).sum(axis=1) / np.maximum(others, 1)
    units = (others > 0).sum(axis=1)
    return np.where(units > 0, np.where(others > 0, means, 0.0).sum(axis=1) / np.maximum(units, 1), np.nan)

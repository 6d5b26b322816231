"""Combine the ratings of several members into one reward. Ratings are [R, G], members by episodes; NaN is a missing one."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from atropos_reward_ensemble.config import Combine
from atropos_reward_ensemble.missing import Ratings

CLOSE = 1e-12  # relative: sums of weights that differ by less are equal


def combined(
    ratings: Ratings,
    how: Combine,
    weights: Ratings,
    *,
    threshold: float = 0.5,
    trim: float = 0.2,
    vetoes: NDArray[np.bool_] | None = None,
) -> Ratings:
    """One value for each episode, [G]; NaN if its ratings do not give one. `weights` [R] are used by mean, weighted, median and
    majority; the others treat all members alike.

    A tied majority is 0. A veto of one member gives 0. Without a veto, the mean of the members that cannot veto counts. If a
    member that can veto gave no rating, there is no value.
    """
    there = ~np.isnan(ratings)
    if how in ("mean", "weighted"):
        return _mean(ratings, weights)
    if how == "median":
        return _median(ratings, weights)
    if how == "majority":
        cast = np.where(there, weights[:, None], 0.0)
        total = cast.sum(axis=0)
        yes = np.where(ratings > threshold, cast, 0.0).sum(axis=0)  # NaN > threshold is False
        return np.where(total > 0, yes > total / 2 * (1 + CLOSE), np.nan)
    if how == "trimmed":
        return _trimmed(ratings, trim)
    if how == "minimum":
        lowest = np.where(there, ratings, np.inf).min(axis=0)
        return np.where(there.any(axis=0), lowest, np.nan)
    if how == "all_of":
        return np.where(there.any(axis=0), (~there | (ratings > threshold)).all(axis=0), np.nan)
    if how == "first_of":
        first = ratings[there.argmax(axis=0), np.arange(ratings.shape[1])]
        return np.asarray(first, np.float64)
    assert vetoes is not None, "combine = veto comes with members that have one"
    rest = _mean(ratings[~vetoes], np.ones(int((~vetoes).sum())))
    allowed = (ratings[vetoes] > threshold).all(axis=0)
    return np.where(there[vetoes].all(axis=0), np.where(allowed, rest, 0.0), np.nan)


def _mean(ratings: Ratings, weights: Ratings) -> Ratings:
    cast = np.where(np.isnan(ratings), 0.0, weights[:, None])
    total = cast.sum(axis=0)
    summed = (cast * np.nan_to_num(ratings)).sum(axis=0)
    return np.where(total > 0, summed / np.where(total > 0, total, 1.0), np.nan)


def _median(ratings: Ratings, weights: Ratings) -> Ratings:
    """The mean of the lower and the upper weighted median; with equal weights, the usual median."""
    order = np.argsort(ratings, axis=0)  # NaN last
    values = np.take_along_axis(ratings, order, axis=0)
    cast = np.where(np.isnan(values), 0.0, weights[order])
    sums = cast.cumsum(axis=0)
    half = sums[-1] / 2
    lower = np.take_along_axis(values, (sums >= half * (1 - CLOSE)).argmax(axis=0)[None], axis=0)[0]
    upper = np.take_along_axis(values, (sums > half * (1 + CLOSE)).argmax(axis=0)[None], axis=0)[0]
    return np.where(half > 0, (lower + upper) / 2, np.nan)


def _trimmed(ratings: Ratings, trim: float) -> Ratings:
    """The mean of the present ratings (m of them) without the floor(trim * m) lowest and highest."""
    given = []
    for column in ratings.T:
        values = np.sort(column[~np.isnan(column)])
        cut = math.floor(trim * len(values) + 1e-9)
        given.append(values[cut : len(values) - cut].mean() if len(values) else np.nan)
    return np.array(given)

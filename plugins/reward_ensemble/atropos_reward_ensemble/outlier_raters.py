"""Find judges and other raters that disagree with the rest, with a sequential test that may be evaluated after every group.

In an episode that the raters dispute, the odd one out is the rater farthest from the median of the others; raters that are
equally far share it. If m raters are equally good, each is the odd one in 1/m of the disputes, whatever the distribution of
the ratings. A rater is *tolerated* as long as it is the odd one in at most tolerance/m of them.

For a rater and a group, y is the mean, over the group's disputed episodes, of its share in being the odd one, times
m / tolerance. For a tolerated rater the expectation of y, given everything before, is at most 1. With a bet 0 < f < 1,
e = 1 + f (y - 1) then wins nothing on average, and

    M <- (M + 1) e        (Shiryaev and Roberts' sum: the change may come at any time)

grows by at most 1 a group on average. M is averaged over two sizes of f. By optional stopping, the chance that M reaches c
within T groups is at most T / c. So with c = raters * horizon / false_alarm, the chance that any tolerated rater is flagged
within `horizon` groups is at most false_alarm. (Shin, Ramdas, Rinaldo, E-detectors, arXiv 2203.03532.) A group is one bet,
however many episodes it has: those of one task are not independent witnesses.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from atropos_reward_ensemble.missing import Ratings

BETS = np.array([0.5, 0.9])
EQUAL = 1e-9  # distances that differ by less, relative to the largest, are equal


def odd_ones(ratings: Ratings) -> tuple[Ratings, NDArray[np.int_]]:
    """Shares [R, U] that add up to 1 in each disputed unit, NaN if a rating is missing or nothing is disputed; and the number
    of raters in each unit, [U]. Fewer than three raters cannot dispute."""
    there = ~np.isnan(ratings)
    many = there.sum(axis=0)
    distance = np.full(ratings.shape, np.nan)
    ordered = np.sort(ratings, axis=0)  # NaN last
    units = np.arange(ratings.shape[1])
    for rater in range(len(ratings)):  # the median of the others, read off the order with this one left out
        place = (np.where(there, ratings, np.inf) < ratings[rater]).sum(axis=0)
        others = np.maximum(many - 1, 1)
        below, above = (others - 1) // 2, others // 2
        low = ordered[np.minimum(below + (below >= place), len(ratings) - 1), units]
        high = ordered[np.minimum(above + (above >= place), len(ratings) - 1), units]
        distance[rater] = np.abs(ratings[rater] - (low + high) / 2)
    filled = np.where(there, distance, -np.inf)
    most, least = filled.max(axis=0), np.where(there, distance, np.inf).min(axis=0)
    with np.errstate(invalid="ignore"):
        disputed = (many >= 3) & (most - least > EQUAL * np.maximum(np.abs(most), 1e-300))
        odd = filled >= most - EQUAL * np.abs(most)
    shares = np.where(odd, 1.0, 0.0) / np.maximum(odd.sum(axis=0), 1)
    return np.where(there & disputed, shares, np.nan), many


def scores(ratings: Ratings, tolerance: float) -> Ratings:
    """y of each rater, [R], for one group [R, G]; NaN if it has no disputed episode."""
    shares, many = odd_ones(ratings)
    counted = ~np.isnan(shares)
    episodes = counted.sum(axis=1)
    summed = np.where(counted, shares * many / tolerance, 0.0).sum(axis=1)
    return np.where(episodes > 0, summed / np.maximum(episodes, 1), np.nan)


def grown(evidence: Ratings, score: Ratings) -> Ratings:
    """Updated evidence: `evidence` [..., 2] is log(1 + M) of each bet; `score` [...] is y, NaN if there is nothing to bet on."""
    y = score[..., None]
    with np.errstate(invalid="ignore"):
        after = np.logaddexp(0.0, evidence + np.log1p(BETS * (y - 1.0)))
    return np.where(np.isnan(y), evidence, after)


def bound(raters: int, horizon: int, false_alarm: float) -> float:
    """log(1 + c), the `total` at which a rater is flagged."""
    return math.log1p(raters * horizon / false_alarm)


def total(evidence: Ratings) -> Ratings:
    """log(1 + M), M averaged over the bets: [...]."""
    return np.asarray(np.logaddexp.reduce(evidence, axis=-1) - math.log(len(BETS)))


class Departures:
    """The test over R raters. A flagged rater stays flagged, and the others are then compared without it."""

    def __init__(self, raters: int, *, tolerance: float, false_alarm: float, horizon: int) -> None:
        self.flagged = np.zeros(raters, bool)
        self._tolerance = tolerance
        self._bound = bound(raters, horizon, false_alarm)
        self._evidence = np.zeros((raters, len(BETS)))

    def add(self, ratings: Ratings) -> list[int]:
        """Add one group's ratings [R, G] and return the raters that are now flagged."""
        score = scores(np.where(self.flagged[:, None], np.nan, ratings), self._tolerance)
        self._evidence = grown(self._evidence, score)
        new = (total(self._evidence) >= self._bound) & ~self.flagged
        self.flagged = self.flagged | new
        return [int(rater) for rater in np.flatnonzero(new)]

    def suspicion(self) -> Ratings:
        """[R]: the logarithm of the evidence against each rater, scaled so that it is flagged at 1."""
        return np.asarray(np.where(self.flagged, 1.0, np.minimum(total(self._evidence) / self._bound, 1.0)))

    def state(self) -> dict[str, Any]:
        return {"flagged": self.flagged.tolist(), "evidence": self._evidence.tolist()}

    def load(self, state: Mapping[str, Any]) -> None:
        self.flagged = np.array(state["flagged"], bool)
        self._evidence = np.array(state["evidence"], np.float64)

"""Policies small enough to list every episode, and the exact expectation of any advantage estimator over them.

    from atropos_credit.kit import WORLDS, listed, measured

    policy = listed(WORLDS["stopping"], seed=0)
    measured(my_estimator, policy, group_size=3).bias

An estimator is a function of the episodes of one task (`atropos_credit.turns.Turns`) that returns an array for each: advantages of
its turns [T], or of its tokens [L]. `atropos bias ./mine.py:my_estimator` prints the same for every world.
"""

from __future__ import annotations

from atropos_credit.kit.expectation import Measured, expected_score, likelihood, measured
from atropos_credit.kit.policy import Listed, listed
from atropos_credit.kit.rows import by_rows, by_scores
from atropos_credit.kit.worlds import WORLDS, World

__all__ = [
    "WORLDS",
    "Listed",
    "Measured",
    "World",
    "by_rows",
    "by_scores",
    "expected_score",
    "likelihood",
    "listed",
    "measured",
]

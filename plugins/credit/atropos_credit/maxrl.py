"""Maximum likelihood reinforcement learning (MaxRL, arXiv 2602.02710): replies that are right or wrong, and the log of the success
rate in place of the rate itself."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from atropos_core.types import Bools
from atropos_credit.turns import Advantages, Turns, Values


def maxrl_advantages(right: Bools) -> Values:
    """(R - mean) / mean [G] with R = 1 for a right reply and 0 for a wrong one; 0 if none is right.

    With success rate p, the expected gradient is that of -sum_(k < G) (1 - p)^k / k, the first G - 1 terms of log p. Without the mean
    in the numerator it would be the first G: it is not subtracted in groups that failed altogether, and that costs the last term.
    The authors' code, prime-rl and SkyRL do the same."""
    share = float(np.mean(right)) if len(right) else 0.0
    return np.zeros(len(right)) if share == 0 else (right.astype(np.float64) - share) / share


def maxrl(group: Sequence[Turns]) -> Advantages:
    """The same for whole episodes, [T] each: a score above 0 is right."""
    made = maxrl_advantages(np.array([one.score > 0 for one in group]))
    return [np.full(len(one.rewards), value) for one, value in zip(group, made, strict=True)]

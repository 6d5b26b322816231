"""Episodes as estimators see them: rewards by turn."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Values = NDArray[np.float64]
Advantages = list[Values]  # of each episode, [T]
Estimator = Callable[[Sequence["Turns"]], Sequence[Values]]  # of the episodes of one task


@dataclass(frozen=True)
class Turns:
    """One episode of T turns. Of a turn, the policy sampled every token."""

    rewards: Values  # [T] that each turn earned
    outcome: float = 0.0  # what only the end earned
    states: tuple[Hashable, ...] = ()  # [T] what the policy saw before each turn; turns in equal states can be compared
    lengths: tuple[int, ...] = ()  # [T] tokens of each turn

    @property
    def score(self) -> float:
        return float(self.rewards.sum()) + self.outcome

    def earned(self, outcome_weight: float = 1.0, turn_weight: float = 1.0) -> Values:
        """[T] The weighted rewards, the outcome with the last turn. Without a turn, nothing."""
        rewards = turn_weight * self.rewards
        if len(rewards):
            rewards[-1] += outcome_weight * self.outcome
        return rewards


def returns(rewards: Values, discount: float = 1.0) -> Values:
    """[T] What is earned from each turn on: G_t = r_t + discount G_(t+1)."""
    made, following = np.zeros(len(rewards)), 0.0
    for t in reversed(range(len(rewards))):
        made[t] = following = rewards[t] + discount * following
    return made

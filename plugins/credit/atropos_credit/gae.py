"""Generalised advantage estimation (arXiv 1506.02438) over turns, with the group in the place of a learned value.

The value of a turn is the mean return of the other episodes at the same turn. It is an unbiased baseline, but as a bootstrap
it stands for the value of a state and knows only the turn. So there is a bias for gae_lambda below 1, and it grows as
gae_lambda falls; with 1 nothing is bootstrapped and the result is that of `turn_returns`."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from atropos_credit.returns import means_of_others
from atropos_credit.turns import Advantages, Turns, Values, returns


def turn_gae(
    group: Sequence[Turns],
    *,
    gae_lambda: float = 0.95,
    discount: float = 1.0,
    outcome_weight: float = 1.0,
    turn_weight: float = 1.0,
) -> Advantages:
    """Advantages [T] of each episode of one task: L_t - V_t with L_t = r_t + discount ((1 - gae_lambda) V_(t+1) + gae_lambda
    L_(t+1)), which equals the sum of (discount gae_lambda)^k times the TD errors (eq. 16).

    After an episode's last turn, L is 0. If no other episode reached turn t + 1, V_(t+1) is not known, and L_(t+1) counts in full.
    A group of one gets 0."""
    if len(group) < 2:
        return [np.zeros(len(one.rewards)) for one in group]
    earned = [one.earned(outcome_weight, turn_weight) for one in group]
    every = [returns(rewards, discount) for rewards in earned]
    lengths = sorted(len(one) for one in every)
    made = []
    for rewards, values in zip(earned, means_of_others(every), strict=True):
        reached = lengths[-2] if len(rewards) == lengths[-1] else lengths[-1]  # by another episode
        made.append(_lambda_returns(rewards, values, reached, gae_lambda, discount) - values)
    return made


def _lambda_returns(rewards: Values, values: Values, reached: int, gae_lambda: float, discount: float) -> Values:
    made, following = np.zeros(len(rewards)), 0.0
    for t in reversed(range(len(rewards))):
        if t + 1 < min(len(rewards), reached):
            following = (1.0 - gae_lambda) * values[t + 1] + gae_lambda * following
        made[t] = following = rewards[t] + discount * following
    return made

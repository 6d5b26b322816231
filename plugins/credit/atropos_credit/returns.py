"""Returns of each turn against a baseline of the group.

The policy gradient of an episode's score is the sum over turns of (G_t - b_t) times the gradient of the turn's log-probability,
with G_t what is earned from turn t on (Sutton et al. 2000). It stays the gradient for every baseline b_t that does not depend
on what the policy chose from turn t on.

Returns of other episodes at the same turn are such a baseline, however many turns each episode has: the others were sampled
independently, and reaching turn t was decided before it. Two constructions that look alike are not:

- The mean that includes the episode itself shrinks turn t to (n - 1) / n, with n episodes that reach it. That is less for turns
  that few reach, so the turns' gradients are no longer in proportion.
- Rewards that are centred at each turn and summed afterwards subtract one baseline for each turn that the episode still takes.
  How many these are is the policy's choice, so that taking another turn is charged the group's mean reward.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from atropos_core.advantages import is_noise
from atropos_credit.turns import Advantages, Turns, Values, returns

Baseline = Literal["others", "state", "group", "none"]


def turn_returns(
    group: Sequence[Turns],
    baseline: Baseline = "others",
    *,
    discount: float = 1.0,
    outcome_weight: float = 1.0,
    turn_weight: float = 1.0,
    divide_by_std: bool = False,
) -> Advantages:
    """Advantages [T] of each episode of one task: G_t - b_t. A turn earns `turn_weight` times its reward, and the last one also
    `outcome_weight` times the outcome reward.

    - others: b_t is the mean return at turn t of the other episodes that reached it (RLOO, arXiv 2402.14740, for each turn). If
      none did, that of the last turn that one of them reached. Unbiased with discount 1.
    - state: the mean return of the other episodes from the same state, whenever they were there; as "others" for a state that no
      other episode was in. Unbiased with discount 1, whatever a state leaves out: it was there before the policy chose.
    - group: the mean at turn t of all episodes that reached it, with `divide_by_std` divided by their standard deviation.
    - none: b_t = 0.

    With a baseline, a group of one gets 0."""
    every = [returns(one.earned(outcome_weight, turn_weight), discount) for one in group]
    if baseline == "none":
        return every
    if len(every) < 2:
        return [np.zeros(len(one)) for one in every]
    if baseline == "group":
        return _centred(every, divide_by_std)
    expected = means_of_others(every)
    if baseline == "state":
        expected = _in_same_state([one.states for one in group], every, expected)
    return [one - mean for one, mean in zip(every, expected, strict=True)]


def means_of_others(every: Sequence[Values]) -> list[Values]:
    """For each of these G >= 2 columns [T], the mean of the others at each of its turns, or at the last turn that any of them reached. 0
    without any."""
    lengths = np.array([len(one) for one in every])
    there = np.arange(lengths.max(initial=1)) < lengths[:, None]  # [G, T]
    table = np.zeros(there.shape)
    table[there] = np.concatenate(every)
    counts = there.sum(0) - there
    means = np.divide(table.sum(0) - table, counts, out=np.zeros(there.shape), where=counts > 0)
    last = np.maximum((counts > 0).sum(1) - 1, 0)
    filled = np.where(counts > 0, means, np.take_along_axis(means, last[:, None], 1))
    return [row[:length] for row, length in zip(filled, lengths, strict=True)]


def _in_same_state(
    states: Sequence[Sequence[Hashable]], every: Sequence[Values], otherwise: Sequence[Values]
) -> list[Values]:
    """The same for the others' values in the same state, or `otherwise` for a state that none of them was in."""
    own = [_by_state(where, values) for where, values in zip(states, every, strict=True)]
    total: dict[Hashable, NDArray[np.float64]] = {}
    for one in own:
        for state, sums in one.items():
            total[state] = total.get(state, 0.0) + sums
    made = []
    for where, mine, base in zip(states, own, otherwise, strict=True):
        rest = [total[state] - mine[state] for state in where]
        made.append(
            np.array(
                [sums[0] / sums[1] if sums[1] else other for sums, other in zip(rest, base, strict=True)], np.float64
            )
        )
    return made


def _by_state(states: Sequence[Hashable], values: Values) -> dict[Hashable, NDArray[np.float64]]:
    """Sum and number of the values in each state."""
    made: dict[Hashable, NDArray[np.float64]] = {}
    for state, value in zip(states, values, strict=True):
        made[state] = made.get(state, 0.0) + np.array([value, 1.0])
    return made


def _centred(every: Sequence[Values], divide: bool) -> Advantages:
    made = [np.zeros(len(one)) for one in every]
    for t in range(max(len(one) for one in every)):
        there = [at for at, one in enumerate(every) if len(one) > t]
        for at, value in zip(there, centred([every[at][t] for at in there], divide), strict=True):
            made[at][t] = value
    return made


def centred(values: Sequence[float], divide: bool) -> Values:
    """Differences from the mean; with `divide`, in standard deviations (Bessel), or 0 if these are only noise."""
    away = np.asarray(values, np.float64) - np.mean(values)
    if not divide or len(values) < 2:
        return away
    deviation = float(np.std(values, ddof=1))
    return np.zeros(len(values)) if is_noise(deviation, float(np.abs(values).max())) else away / deviation

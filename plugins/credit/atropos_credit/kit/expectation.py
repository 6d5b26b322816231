"""The expected gradient of an advantage estimator, and how far it is from the gradient of an objective."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations_with_replacement
from typing import Literal

import numpy as np

from atropos_core.errors import DataError
from atropos_credit.kit.policy import Listed
from atropos_credit.turns import Estimator, Turns, Values

Average = Literal["sum", "sequence", "token"]
Objective = Callable[[Listed], Values]  # its gradient [P]
REVERSED = 40  # groups that are also given in the reverse order


@dataclass(frozen=True)
class Measured:
    """The expected gradient g of an estimator, next to the gradient of the objective."""

    bias: float  # |E g - true| / |true|
    scale: float  # of the true gradient in E g: 1 for an exact estimator
    # |E g / scale - true| / |true|, the tangent of the angle between both: no learning rate corrects it. inf if scale is not above 0
    turned: float
    noise: float  # sqrt(E |g - E g|²) / |scale true|, of one group. inf if scale is not above 0


def expected_score(
    discount: float = 1.0, outcome_weight: float = 1.0, turn_weight: float = 1.0
) -> Callable[[Listed], Values]:
    """The objective E[sum_t discount^t r_t], with weighted rewards: by default the expected score."""

    def value(turns: Turns) -> float:
        rewards = turns.earned(outcome_weight, turn_weight)
        return float((discount ** np.arange(len(rewards)) * rewards).sum())

    return lambda policy: policy.gradient_of(np.array([value(turns) for turns in policy.episodes]))


def likelihood(order: int) -> Callable[[Listed], Values]:
    """The objective -sum_(k <= order) (1 - p)^k / k, the first terms of log p, with p the probability of a score above 0."""

    def gradient(policy: Listed) -> Values:
        right = np.array([float(turns.score > 0) for turns in policy.episodes])
        failed = 1.0 - float((policy.probabilities * right).sum())
        return sum(failed ** (k - 1) for k in range(1, order + 1)) * policy.gradient_of(right)

    return gradient


def measured(
    estimator: Estimator,
    policy: Listed,
    objective: Objective | None = None,
    *,
    group_size: int = 3,
    average: Average = "sum",
) -> Measured:
    """Measure an estimator over every group of episodes, each with its probability. The gradient of a group is the sum over its
    tokens of w times advantage times the gradient of log p. w is 1 / G ("sum"), divided by the episode's tokens ("sequence"), or 1
    over all tokens of the group ("token"), as in `trainer.average`. By default the objective is the expected score.

    Raises DataError if the estimator gives arrays of the wrong shape or values that are not finite, or if its result depends on the
    order of a group's episodes."""
    true = (objective or expected_score())(policy)
    mean, square = np.zeros(len(true)), 0.0
    for number, (members, probability) in enumerate(_groups(policy, group_size)):
        advantages = _by_token(estimator, policy, members)
        if number % max(1, _count(policy, group_size) // REVERSED) == 0:
            _check_order(estimator, policy, members, advantages)
        gradient = _gradient(policy, members, advantages, average)
        mean += probability * gradient
        square += probability * float(gradient @ gradient)
    size = float(np.linalg.norm(true))
    scale = float(mean @ true) / size**2
    return Measured(
        bias=float(np.linalg.norm(mean - true)) / size,
        scale=scale,
        turned=float(np.linalg.norm(mean / scale - true)) / size if scale > 0 else math.inf,
        noise=math.sqrt(max(square - float(mean @ mean), 0.0)) / (scale * size) if scale > 0 else math.inf,
    )


def _count(policy: Listed, group_size: int) -> int:
    return math.comb(len(policy.episodes) + group_size - 1, group_size)


def _groups(policy: Listed, group_size: int) -> Iterator[tuple[tuple[int, ...], float]]:
    """Yield every group without regard to order, with the probability of all its orders together."""
    for members in combinations_with_replacement(range(len(policy.episodes)), group_size):
        orders = math.factorial(group_size)
        for times in Counter(members).values():
            orders //= math.factorial(times)
        yield members, orders * float(np.prod(policy.probabilities[list(members)]))


def _gradient(policy: Listed, members: Sequence[int], advantages: Sequence[Values], average: Average) -> Values:
    lengths = [len(policy.scores[member]) for member in members]
    made = np.zeros(policy.scores[0].shape[1])
    for member, values, length in zip(members, advantages, lengths, strict=True):
        weight = {"sum": len(members), "sequence": len(members) * length, "token": sum(lengths)}[average]
        made += values @ policy.scores[member] / weight
    return made


def _by_token(estimator: Estimator, policy: Listed, members: Sequence[int]) -> list[Values]:
    given = estimator([policy.episodes[member] for member in members])
    if len(given) != len(members):
        raise DataError(f"the estimator returned {len(given)} arrays for {len(members)} episodes.")
    made = []
    for member, one in zip(members, given, strict=True):
        turns, values = policy.episodes[member], np.asarray(one, np.float64)
        if values.shape == (len(turns.rewards),):
            values = np.repeat(values, turns.lengths)
        if values.shape != (sum(turns.lengths),):
            raise DataError(
                f"the estimator returned an array of shape {values.shape} for an episode of {len(turns.rewards)} turns and "
                f"{sum(turns.lengths)} tokens.",
                remedy="Return one advantage for each turn or for each token.",
            )
        if not np.isfinite(values).all():
            raise DataError(f"the estimator returned {values.tolist()}, which are not all finite.")
        made.append(values)
    return made


def _check_order(estimator: Estimator, policy: Listed, members: Sequence[int], advantages: Sequence[Values]) -> None:
    back = _by_token(estimator, policy, members[::-1])[::-1]
    if not all(np.allclose(one, other, rtol=1e-9, atol=1e-9) for one, other in zip(advantages, back, strict=True)):
        raise DataError(
            "the estimator gives other advantages if the episodes of a group come in the reverse order.",
            remedy="Its expectation is taken over groups without regard to order: remove what depends on the order.",
        )

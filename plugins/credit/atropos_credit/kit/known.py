"""The estimators that `atropos bias` measures by default, each with the objective that it is for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np

from atropos_credit.gae import turn_gae
from atropos_credit.gigpo import gigpo
from atropos_credit.kit.expectation import Average, Objective, expected_score, likelihood
from atropos_credit.maxrl import maxrl
from atropos_credit.returns import centred, turn_returns
from atropos_credit.turns import Advantages, Estimator, Turns, returns

TASKS = ("fixed", "stopping", "rooms")
SCORE = "expected score"


class Known(NamedTuple):
    """One row of the table."""

    name: str
    estimator: Estimator
    objective_name: str = SCORE
    objective: Callable[[int], Objective] = lambda group_size: expected_score()
    average: Average = "sum"
    worlds: Sequence[str] = TASKS


def episode_baseline(group: Sequence[Turns], baseline: str, divide: bool = False) -> Advantages:
    """Advantages as the transform `group_advantage` computes them, in float64: one for a whole episode."""
    scores = np.array([one.score for one in group])
    if baseline == "others":
        values = (scores - scores.mean()) * len(scores) / max(len(scores) - 1, 1)
    else:
        values = centred(list(scores), divide)
    return [np.full(len(one.rewards), value) for one, value in zip(group, values, strict=True)]


def centred_then_summed(group: Sequence[Turns]) -> Advantages:
    """Rewards centred at each turn, then summed from each turn on: the construction that issue 7244 of verl describes. No transform
    offers it."""
    earned = [one.earned() for one in group]
    made = [np.zeros(len(one)) for one in earned]
    for t in range(max(map(len, earned))):
        there = [at for at, one in enumerate(earned) if len(one) > t]
        for at, value in zip(there, centred([earned[at][t] for at in there], False), strict=True):
            made[at][t] = value
    return [returns(one) for one in made]


def _score(**values: float) -> Callable[[int], Objective]:
    return lambda group_size: expected_score(**values)


KNOWN = (
    Known("turn_returns", turn_returns),
    Known("turn_returns, baseline = state", partial(turn_returns, baseline="state")),
    Known("turn_returns, baseline = group", partial(turn_returns, baseline="group")),
    Known("turn_returns, baseline = group, divide_by_std", partial(turn_returns, baseline="group", divide_by_std=True)),
    Known(
        "turn_returns, turn_weight = 0.5", partial(turn_returns, turn_weight=0.5),
        "outcome + half of the turn rewards", _score(turn_weight=0.5),
    ),
    Known("turn_returns, discount = 0.9", partial(turn_returns, discount=0.9)),
    Known(
        "turn_returns, discount = 0.9", partial(turn_returns, discount=0.9),
        "expected discounted score", _score(discount=0.9),
    ),
    Known("turn_gae, gae_lambda = 0.95", partial(turn_gae, gae_lambda=0.95)),
    Known("turn_gae, gae_lambda = 0.5", partial(turn_gae, gae_lambda=0.5)),
    Known("gigpo", gigpo),
    Known("gigpo, divide_by_std", partial(gigpo, divide_by_std=True)),
    Known("group_advantage, baseline = others", partial(episode_baseline, baseline="others")),
    Known("group_advantage, divide_by_std = false", partial(episode_baseline, baseline="group")),
    Known("group_advantage", partial(episode_baseline, baseline="group", divide=True)),
    Known("rewards centred at each turn, then summed", centred_then_summed),
    Known("turn_returns under average = sequence", turn_returns, average="sequence"),
    Known("turn_returns under average = token", turn_returns, average="token"),
    Known("maxrl", maxrl, "G - 1 terms of log p", lambda group_size: likelihood(group_size - 1), worlds=("answer",)),
    Known("maxrl", maxrl, "G terms of log p", likelihood, worlds=("answer",)),
)  # fmt: skip

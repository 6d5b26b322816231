"""Groups in the forms that other estimators take: scores of episodes, and padded rows of tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from atropos_core.errors import DataError
from atropos_credit.turns import Advantages, Estimator, Turns, Values

OBSERVATION = 1  # tokens between two turns, which the environment wrote


def by_scores(function: Callable[[Values], Any]) -> Estimator:
    """The estimator of a function that takes the scores [G] of a group, and returns an advantage for each episode."""

    def estimator(group: Sequence[Turns]) -> Advantages:
        made = np.asarray(function(np.array([turns.score for turns in group])), np.float64)
        if made.shape != (len(group),):
            raise DataError(f"a function of {len(group)} scores returned an array of shape {made.shape}.")
        return [np.full(len(turns.rewards), value) for turns, value in zip(group, made, strict=True)]

    return estimator


def by_rows(function: Callable[..., Any], **options: Any) -> Estimator:
    """The estimator that calls function(token_level_rewards=[G, W], response_mask=[G, W], index=[G], **options), a pair of tensors
    (advantages, returns), as verl and SkyRL register them. In a row, one token that was not sampled stands between two turns; the
    reward of a turn is at its last token, and the outcome at the last of all. All arithmetic is in float64."""
    import torch

    def estimator(group: Sequence[Turns]) -> Advantages:
        places = [_token_positions(turns) for turns in group]
        width = max(int(place[-1]) + 1 for place in places)
        rewards, mask = torch.zeros(len(group), width, dtype=torch.float64), torch.zeros(len(group), width)
        for row, (turns, place) in enumerate(zip(group, places, strict=True)):
            mask[row, torch.from_numpy(place)] = 1.0
            last = torch.from_numpy(place[np.cumsum(turns.lengths) - 1])
            rewards[row, last] = torch.from_numpy(turns.earned())
        index = np.array(["task"] * len(group), object)
        given, _ = function(token_level_rewards=rewards, response_mask=mask.double(), index=index, **options)
        return [given[row].double().numpy()[place] for row, place in enumerate(places)]

    return estimator


def _token_positions(turns: Turns) -> Any:
    """[L] The positions of the sampled tokens in the row."""
    between = np.repeat(np.arange(len(turns.lengths)) * OBSERVATION, turns.lengths)
    return np.arange(sum(turns.lengths)) + between

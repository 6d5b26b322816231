"""The transforms: estimators on the groups of a run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from atropos_core.advantages import is_noise
from atropos_core.errors import DataError
from atropos_core.interfaces import Transform
from atropos_core.types import Bools, Metrics, ScoredGroup
from atropos_credit.config import GigpoOptions, MaxRlOptions, State, TurnGaeOptions, TurnReturnsOptions
from atropos_credit.gae import turn_gae
from atropos_credit.gigpo import gigpo
from atropos_credit.maxrl import maxrl_advantages
from atropos_credit.placed import turns_of, with_advantages
from atropos_credit.returns import turn_returns
from atropos_credit.turns import Estimator, Turns, Values

Weights = tuple[float, float]  # of the outcome reward, and of turn rewards


class ByTurn(Transform):
    """Gives each turn the advantage that an estimator has for it. A group that has advantages keeps them."""

    def __init__(
        self,
        estimator: Estimator,
        state: State = "observation",
        *,
        weights: Weights = (1.0, 1.0),
        divides: bool = False,
    ) -> None:
        """`weights`: how many times an advantage has the outcome reward and a turn reward at most. `divides`: the estimator divides by a
        deviation."""
        self._estimator = estimator
        self._state = state
        self._weights = weights
        self._divides = divides
        self._episodes = self._turns = self._rewarded = self._met = 0  # of the step

    async def __call__(self, groups: Sequence[ScoredGroup]) -> Sequence[ScoredGroup]:
        return [group if group.advantages is not None else self._credited(group) for group in groups]

    def metrics(self) -> Metrics:
        """`turns`: turns of an episode, the mean; `rewarded`: share of the turns that earned something before the end; `met_again`:
        share of the turns in a state that another turn of the group was in."""
        turns = max(self._turns, 1)
        metrics = {
            "turns": self._turns / max(self._episodes, 1),
            "rewarded": self._rewarded / turns,
            "met_again": self._met / turns,
        }
        self._episodes = self._turns = self._rewarded = self._met = 0
        return metrics

    def _credited(self, group: ScoredGroup) -> ScoredGroup:
        every = turns_of(group, self._state)
        made = self._estimator(every)
        if not self._divides:  # what is divided is not of the size of rewards, and `centred` has removed noise before
            made = _without_noise(made, every, self._weights)
        states = [state for turns in every for state in turns.states]
        self._episodes += len(every)
        self._turns += len(states)
        self._rewarded += sum(int(np.count_nonzero(turns.rewards)) for turns in every)
        self._met += len(states) - sum(states.count(state) == 1 for state in set(states))
        credited = replace(
            group,
            episodes=tuple(
                with_advantages(episode, values) for episode, values in zip(group.episodes, made, strict=True)
            ),
        )
        # Of an episode: the mean over its tokens, for records and health checks.
        return credited.with_advantages(np.array([_mean(*one) for one in zip(every, made, strict=True)], np.float32))


def _mean(turns: Turns, advantages: Values) -> float:
    return float(np.average(advantages, weights=turns.lengths)) if len(advantages) else 0.0


def _without_noise(advantages: Sequence[Values], group: Sequence[Turns], weights: Weights) -> Sequence[Values]:
    """Zeros if all that the advantages differ by is rounding of the weighted rewards, so that the group counts as flat."""
    largest = max((float(np.abs(values).max()) for values in advantages if len(values)), default=0.0)
    outcomes = max((abs(turns.outcome) for turns in group), default=0.0)
    rewards = max((float(np.abs(turns.rewards).max(initial=0.0)) for turns in group), default=0.0)
    of_outcome, of_turn = weights
    is_rounding = [
        is_noise(largest / weight, size)
        for weight, size in ((of_outcome, outcomes), (of_turn, rewards))
        if weight and size
    ]
    return [values * 0.0 for values in advantages] if any(is_rounding) else advantages


def turn_returns_transform(options: TurnReturnsOptions) -> ByTurn:
    return ByTurn(
        partial(
            turn_returns,
            baseline=options.baseline,
            discount=options.discount,
            outcome_weight=options.outcome_weight,
            turn_weight=options.turn_weight,
            divide_by_std=options.divide_by_std,
        ),
        options.state,
        weights=(options.outcome_weight, options.turn_weight),
        divides=options.divide_by_std,
    )


def turn_gae_transform(options: TurnGaeOptions) -> ByTurn:
    return ByTurn(
        partial(
            turn_gae,
            gae_lambda=options.gae_lambda,
            discount=options.discount,
            outcome_weight=options.outcome_weight,
            turn_weight=options.turn_weight,
        ),
        weights=(options.outcome_weight, options.turn_weight),
    )


def gigpo_transform(options: GigpoOptions) -> ByTurn:
    return ByTurn(
        partial(gigpo, step_weight=options.step_weight, discount=options.discount, divide_by_std=options.divide_by_std),
        options.state,
        divides=options.divide_by_std,
    )


class MaxRl(Transform):
    """Divides advantages by the share of replies that are correct. A group that has advantages keeps them."""

    def __init__(self, options: MaxRlOptions) -> None:
        self._above = options.correct_above

    async def __call__(self, groups: Sequence[ScoredGroup]) -> Sequence[ScoredGroup]:
        return [
            group
            if group.advantages is not None
            else group.with_advantages(maxrl_advantages(self._right(group)).astype(np.float32))
            for group in groups
        ]

    def _right(self, group: ScoredGroup) -> Bools:
        if self._above is not None:
            return np.asarray(group.rewards > self._above)
        verdicts = [episode.correct for episode in group.episodes]
        if None in verdicts:
            raise DataError(
                f"the transform 'maxrl' needs to know which replies are correct, and environment {group.draw.environment!r} does not "
                "say.",
                remedy="Set correct_above: a reward above it counts as correct.",
            )
        return np.array(verdicts, bool)

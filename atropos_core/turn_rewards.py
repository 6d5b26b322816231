"""Rewards inside a rollout: place them at the policy's turns, mix those of several rewards, and find the outcome reward."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from atropos_core.errors import DataError
from atropos_core.group_schema import LARGEST_REWARD
from atropos_core.types import Episode, Rollout, Score, ScoredGroup, TurnRewards

Placed = tuple[TurnRewards | None, ...]  # of each rollout of an episode
ROUNDING = 2.0**-21  # of a total in 32 bits, relative to the largest number that it is a sum of: four roundings


def turn_ends(rollout: Rollout) -> NDArray[np.int64]:
    """Return the position after the last token of each turn [K]. A turn is a run of sampled tokens."""
    following = np.append(rollout.sampled[1:], False)
    return np.flatnonzero(rollout.sampled & ~following).astype(np.int64) + 1


def turns_in_order(rollouts: Sequence[Rollout]) -> list[tuple[int, int]]:
    """Return the rollout, and the position after the last token there, of each turn of an episode, in the order of time:
    `Rollout.turn_order`, or rollout by rollout if there is none."""
    places = [(number, end) for number, one in enumerate(rollouts) for end in turn_ends(one).tolist()]
    orders = [one.turn_order for one in rollouts]
    if any(order is None for order in orders):
        return places
    when = np.concatenate([order for order in orders if order is not None])
    return [places[at] for at in np.argsort(when, kind="stable").tolist()]


def by_turn(rollout: Rollout) -> NDArray[np.float64]:
    """Return the sum of the rewards that were placed in each turn [K], 0 for a turn without."""
    ends = turn_ends(rollout)
    made = np.zeros(len(ends))
    if rollout.turns is not None:
        np.add.at(made, np.searchsorted(ends, rollout.turns.ends), rollout.turns.values)
    return made


def placed(
    rollouts: Sequence[Rollout],
    turns: Sequence[float] | Sequence[TurnRewards | None],
    places: Sequence[tuple[int, int]] | None = None,
) -> Placed:
    """Return `Score.turns` as turn rewards of each rollout. `places`: of each turn, the number of its rollout and the position after
    its last token there, 0 for a turn without tokens; if not given, turns are those of `turns_in_order`. Raises DataError if `turns`
    does not fit."""
    if (
        isinstance(turns, Mapping | str | bytes | set)
        or not hasattr(turns, "__iter__")
        or getattr(turns, "ndim", 1) != 1
    ):
        raise DataError(
            f"the turn rewards of a score are {turns!r:.100}, which are not a list of numbers.",
            remedy="Give one number for each reply that the policy sampled, in order, 0 for a turn that earned nothing.",
        )
    given = list(turns)
    if given and all(one is None or isinstance(one, TurnRewards) for one in given):
        if len(given) != len(rollouts):
            raise DataError(
                f"a score has turn rewards for {len(given)} rollouts, but its episode has {len(rollouts)}.",
                remedy="Give one TurnRewards, or None, for each rollout of the episode; or one number for each turn.",
            )
        return tuple(given)  # type: ignore[arg-type] # checked above
    if places is None:
        places = turns_in_order(rollouts)
    if len(given) != len(places):
        raise DataError(
            f"a score has {len(given)} turn rewards, but the policy had {len(places)} turns.",
            remedy="Give one number for each reply that the policy sampled, in order, 0 for a turn that earned nothing.",
        )
    by_rollout: list[dict[int, float]] = [{} for _ in rollouts]
    for (number, end), value in zip(places, map(_number, given), strict=True):
        if end:
            by_rollout[number][end] = value
        elif value:
            raise DataError(
                "a turn reward is for a turn in which the policy sampled no token, so no token can be rewarded for it.",
                remedy="Give 0 for this turn, and leave what it earned to the outcome, the rest of the score.",
            )
    return tuple(turn_rewards(sorted(own), [own[end] for end in sorted(own)]) for own in by_rollout)


def turn_rewards(ends: Sequence[int], values: Sequence[float]) -> TurnRewards:
    """Return TurnRewards from plain numbers. Raises DataError if they are not valid. Text and fractions are not read as positions."""
    return TurnRewards(
        np.array([_position(end) for end in ends], np.int64), np.array([_number(value) for value in values], np.float64)
    )


def with_turns(rollouts: Sequence[Rollout], turns: Placed) -> tuple[Rollout, ...]:
    """Return the rollouts with these turn rewards in place of their own. Raises DataError for one that is at no sampled token."""
    pairs = zip(rollouts, turns, strict=True)
    return tuple(rollout if rollout.turns is given else replace(rollout, turns=given) for rollout, given in pairs)


def split_scores(given: Any, episodes: Sequence[Episode]) -> tuple[Any, list[Placed | None] | None]:
    """Return a reward's totals, one for each episode, and its turn rewards: None for an episode without, and None if there are none
    at all. Raises DataError for a Score that a reward cannot give."""
    if not isinstance(given, list | tuple) or not any(isinstance(one, Score) for one in given):
        return given, None
    totals = [one.value if isinstance(one, Score) else one for one in given]
    if len(given) != len(episodes):  # the caller reports the totals' shape
        return totals, None
    turns: list[Placed | None] = []
    for one, episode in zip(given, episodes, strict=True):
        if isinstance(one, Score) and (one.correct is not None or one.parts or one.abstains):
            raise DataError(
                "a reward gave a Score with correct, parts or abstains, which only environments can set.",
                remedy="Return Score(value, turns=[...], metrics={...}), or a number.",
            )
        has_turns = isinstance(one, Score) and one.turns is not None
        turns.append(placed(episode.rollouts, one.turns) if has_turns else None)
    return totals, turns if any(one is not None for one in turns) else None


def mixed(episode: Episode, given: Sequence[tuple[float, Placed | None]]) -> Episode:
    """Return the episode whose turn rewards are the weighted sum of those that several rewards gave, in place of its own."""
    by_reward = [(weight, turns) for weight, turns in given if turns is not None]
    if not by_reward and all(rollout.turns is None for rollout in episode.rollouts):
        return episode
    made = []
    for number in range(len(episode.rollouts)):
        there = [(weight, of) for weight, turns in by_reward if (of := turns[number]) is not None]
        made.append(_sum(there) if there else None)
    for turns in made:
        if turns is not None and not (np.abs(turns.values) <= LARGEST_REWARD).all():
            raise DataError(
                f"turn rewards times their weights make {turns.values.tolist()!r:.200}: more than {LARGEST_REWARD:g}"
            )
    return replace(episode, rollouts=with_turns(episode.rollouts, tuple(made)))


def outcome_rewards(group: ScoredGroup) -> NDArray[np.float64]:
    """Return what only the end of each episode earned [G]: its reward, less its turn rewards."""
    totals = group.rewards.astype(np.float64).tolist()
    turns = ([rollout.turns for rollout in episode.rollouts] for episode in group.episodes)
    return np.array([outcome_reward(total, of) for total, of in zip(totals, turns, strict=True)], np.float64)


def outcome_reward(total: float, turns: Iterable[TurnRewards | None]) -> float:
    """Return a reward less its turn rewards. A rest that is no more than the rounding of the reward to 32 bits is 0."""
    values = [value for one in turns if one is not None for value in one.values.tolist()]
    rest = math.fsum([total, *(-value for value in values)])
    return 0.0 if values and abs(rest) <= ROUNDING * max(abs(total), *map(abs, values)) else rest


def _sum(given: Sequence[tuple[float, TurnRewards]]) -> TurnRewards:
    if len(given) == 1:
        [(weight, turns)] = given
        return TurnRewards(turns.ends, weight * turns.values)
    ends = np.unique(np.concatenate([turns.ends for _, turns in given]))
    values = np.zeros(len(ends))
    for weight, turns in given:
        values[np.searchsorted(ends, turns.ends)] += weight * turns.values
    return TurnRewards(ends, values)


def _plain(value: Any) -> Any:
    """Return a scalar of numpy or torch as Python's."""
    item = getattr(value, "item", None)
    return item() if item is not None and getattr(value, "ndim", 1) == 0 else value


def _position(value: Any) -> int:
    plain = _plain(value)
    if not isinstance(plain, int) or isinstance(plain, bool) or abs(plain) >= 2**63:
        raise DataError(f"the end of a turn reward is {value!r:.100}, which is not a position of a token.")
    return plain


def _number(value: Any) -> float:
    plain = _plain(value)
    if not isinstance(plain, bool | int | float):
        raise DataError(f"a turn reward is {value!r:.100}, which is not a number.")
    try:
        return float(plain)
    except OverflowError as error:
        raise DataError("a turn reward has more than 308 digits, which is not a number that can be trained.") from error

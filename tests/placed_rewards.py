"""Groups with rewards placed anywhere in their rollouts, for property tests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from hypothesis import strategies as st

from atropos_core.group_schema import LARGEST_REWARD
from atropos_core.turn_rewards import turn_rewards
from atropos_core.types import Draw, Episode, Rollout, ScoredGroup, Task, TurnRewards, tokens

NUMBERS = st.floats(-LARGEST_REWARD, LARGEST_REWARD)


def rollout(sampled: Sequence[int], turns: TurnRewards | None = None) -> Rollout:
    mask, length = np.array(sampled, np.bool_), len(sampled)
    logprobs = np.where(mask, -0.5, 0).astype(np.float32)
    return Rollout(tokens(range(5, 5 + length)), mask, mask, logprobs, np.zeros(length, np.int32), 1.0, turns=turns)


def group(episodes: Sequence[Episode]) -> ScoredGroup:
    rewards = np.array([one.score for one in episodes], np.float32)
    return ScoredGroup(Draw(1, "e", "train", 0, 3), Task("t", ()), tuple(episodes), rewards, advantages=rewards)


@st.composite
def rollouts(choose: Any) -> Rollout:
    """A rollout with any mask, and rewards at any of its sampled tokens, or none."""
    mask = choose(st.lists(st.booleans(), min_size=1, max_size=20))
    at = [place + 1 for place, sampled in enumerate(mask) if sampled and choose(st.booleans())]
    values = choose(st.lists(NUMBERS, min_size=len(at), max_size=len(at)))
    return rollout(mask, turn_rewards(at, values) if choose(st.booleans()) else None)


GROUPS = st.lists(
    st.builds(Episode, st.lists(rollouts(), min_size=1, max_size=3).map(tuple), NUMBERS), min_size=1, max_size=4
).map(group)


def written(turns: TurnRewards | None) -> tuple[bytes, bytes] | None:
    """The bits, so that 0.0 and -0.0 differ."""
    return None if turns is None else (turns.ends.tobytes(), turns.values.tobytes())


def all_written(made: ScoredGroup) -> list[Any]:
    return [(one.score, [written(of.turns) for of in one.rollouts]) for one in made.episodes]

"""Turn rewards, next to the messages and tokens of a rollout."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from atropos_core.errors import DataError
from atropos_core.turn_rewards import turn_rewards
from atropos_core.types import Rollout, ScoredGroup, tokens
from atropos_records.rollout_records import RolloutRecords
from atropos_viewer.step_rollouts import StepRollouts
from atropos_viewer.token_texts import TokenTexts
from tests.recorded_runs import group_of, recorded, says, user

TALK = (user("1"), says("a"), user("2"), says("bb"))
MASK = np.array([False, True, False, True, True])


def talked(values: list[float], ends: list[int]) -> ScoredGroup:
    """One episode of two replies."""
    turns = turn_rewards(ends, values)
    rollout = Rollout(tokens(range(5, 10)), MASK, MASK, None, np.zeros(5, np.int32), 1.0, turns=turns)
    return group_of(0, [1.0], TALK, rollouts=(rollout,)).with_advantages(np.zeros(1))


def no_texts() -> TokenTexts:
    return TokenTexts(Path("/nowhere"), {"model": "/nowhere"})


async def shown(tmp_path: Path, group: ScoredGroup, **options: Any) -> dict[str, Any]:
    run = await recorded(tmp_path / "run", [group], **options)
    return StepRollouts(RolloutRecords(run).step(1), no_texts, None).one(0)


async def test_a_message_shows_what_its_tokens_earned_and_the_tokens_where(tmp_path: Path):
    one = await shown(tmp_path, talked([0.25, 0.125, 0.5], [2, 4, 5]))
    assert one["turn_rewards"] == [None, 0.25, None, 0.625]
    [sequence] = one["sequences"]
    assert sequence["turn_reward"] == [None, 0.25, None, 0.125, 0.5]
    assert one["outcome_reward"] == 0.125


async def test_without_tokens_turns_are_messages_in_order_if_there_are_as_many(tmp_path: Path):
    one = await shown(tmp_path, talked([0.25, 0.5], [2, 5]), tokens=False)
    assert one["turn_rewards"] == [None, 0.25, None, 0.5]
    (tmp_path / "other").mkdir()
    other = await shown(tmp_path / "other", talked([0.25, 0.125, 0.5], [2, 4, 5]), tokens=False)
    assert other["turn_rewards"] == [None] * 4
    assert other["outcome_reward"] == 0.125


async def test_a_rollout_without_turn_rewards_shows_none(tmp_path: Path):
    group = talked([], [])
    plain = replace(group.episodes[0], rollouts=(replace(group.episodes[0].rollouts[0], turns=None),))
    one = await shown(tmp_path, replace(group, episodes=(plain,)))
    assert (one["turn_rewards"], one["outcome_reward"]) == ([], None)
    assert one["sequences"][0]["turn_reward"] is None
    with pytest.raises(DataError):
        StepRollouts(RolloutRecords(tmp_path / "run").step(1), no_texts, None).one(9)

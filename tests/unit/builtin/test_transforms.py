"""The built-in transforms."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from pydantic import ValidationError

from atropos_core.builtin.config import GroupAdvantageOptions
from atropos_core.builtin.transforms import DropFlat, GroupAdvantage
from atropos_core.types import TopK
from tests.unit.parts import episode, group, rollout


async def test_group_advantage_compares_each_group_with_itself_alone():
    groups = [group(0, [0, 1]), group(1, [100, 104]), group(2, [5, 5])]
    made = await GroupAdvantage(GroupAdvantageOptions())(groups)
    half = np.float32(0.5**0.5)
    assert [one.advantages.tolist() for one in made] == [[-half, half], [-half, half], [0, 0]]
    assert [one.draw.id for one in made] == [0, 1, 2], "nothing is dropped, and the order stays"
    assert [one.rewards.tolist() for one in made] == [[0, 1], [100, 104], [5, 5]]
    assert groups[0].advantages is None, "what it was given is unchanged"


async def test_group_advantage_can_leave_the_deviation_out():
    [made] = await GroupAdvantage(GroupAdvantageOptions(divide_by_std=False))([group(0, [100, 104])])
    assert made.advantages.tolist() == [-2, 2]


async def test_group_advantage_takes_another_baseline_and_refuses_to_divide_by_what_it_does_not_have():
    [made] = await GroupAdvantage(GroupAdvantageOptions(baseline="others"))([group(0, [0, 0, 3])])
    assert made.advantages.tolist() == [-1.5, -1.5, 3]
    [made] = await GroupAdvantage(GroupAdvantageOptions(baseline="none"))([group(0, [2, 2])])
    assert made.advantages.tolist() == [2, 2]
    with pytest.raises(ValidationError, match="remove one of them"):
        GroupAdvantageOptions(baseline="others", divide_by_std=True)


async def test_flat_groups_are_left_out_and_the_others_pass_as_they_are():
    groups = [group(0, [1, 1]), group(1, [0, 1]), group(2, [3]), group(3, [0, 0, 1]), group(4, [0.3, 0.3 + 1e-8])]
    made = await DropFlat()(groups)
    assert len(made) == 2
    assert made[0] is groups[1]
    assert made[1] is groups[3]


async def test_what_drop_flat_leaves_out_is_exactly_what_gets_no_advantage():
    rng = np.random.default_rng(0)
    groups = [group(number, (rng.integers(0, 2, 3) * 0.1 + rng.normal() * 1e3).tolist()) for number in range(64)]
    kept = {one.draw.id for one in await DropFlat()(groups)}
    learned = {one.draw.id for one in await GroupAdvantage(GroupAdvantageOptions())(groups) if one.advantages.any()}
    assert kept == learned


async def test_equal_rewards_without_a_baseline_are_learned_from():
    groups = [group(0, [1, 1]), group(1, [0, 0]), group(2, [0, 1])]
    made = await GroupAdvantage(GroupAdvantageOptions(baseline="none"))(groups)
    assert [one.draw.id for one in await DropFlat()(made)] == [0, 2]


@pytest.mark.parametrize(
    ("columns", "kept"),
    [
        ({"advantages": np.array([0, 0, 1, -1, 0], np.float32)}, True),
        ({"advantages": np.array([9, 9, 0, 0, 0], np.float32)}, False),  # where nothing is trained
        ({"teacher": TopK(np.zeros(6, np.int64), np.zeros(0, np.int32), np.zeros(0, np.float32))}, True),
        ({"sft": True}, True),
        ({}, False),
    ],
)
async def test_flat_groups_that_bring_something_else_to_learn_from_stay(columns, kept):
    flat = group(0, [1, 1])
    flat = replace(flat, episodes=(flat.episodes[0], episode(1.0, "", rollout(**columns))))
    assert list(await DropFlat()([flat])) == [flat] * kept


async def test_no_groups_are_no_trouble():
    assert list(await DropFlat()([])) == []
    assert list(await GroupAdvantage(GroupAdvantageOptions())([])) == []

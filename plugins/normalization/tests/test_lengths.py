"""Transforms by length against formulas written out one reply at a time."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from atropos_core.builtin.config import GroupAdvantageOptions
from atropos_core.builtin.transforms import DropFlat, GroupAdvantage
from atropos_core.errors import ConfigError, DataError
from atropos_normalization.config import EqualGroupOptions, LengthPenaltyOptions
from atropos_normalization.lengths import EqualGroup, LengthPenalty, against_the_group, beyond, lengths
from atropos_testing import transform_contract
from atropos_testing.samples import make_episode, make_group

test_length_penalty_contract = transform_contract("length_penalty")
test_length_penalty_contract_by_the_token = transform_contract(
    "length_penalty", options={"form": "token", "cost": 0.01, "free_tokens": 8}
)
test_equal_group_contract = transform_contract("equal_group", options={"free_tokens": 5, "limit_tokens": 30})


def of(replies, rewards, correct=None):
    """A group of replies so many tokens long, the end among them."""
    group = make_group(0, rewards)
    verdicts = [reward > 0 for reward in rewards] if correct is None else correct
    episodes = tuple(
        make_episode(group.task, "x" * (long - 1), reward, correct=right)
        for long, reward, right in zip(replies, rewards, verdicts, strict=True)
    )
    return replace(group, episodes=episodes)


@given(st.lists(st.tuples(st.integers(1, 4096), st.booleans()), min_size=1, max_size=16))
def test_the_group_s_penalty_is_kimi_s(members):
    """arXiv 2501.12599, section 2.3.3, as it is printed there, one reply at a time."""
    long = [length for length, _ in members]
    wanted = []
    for length, right in members:
        if max(long) == min(long):
            wanted.append(0.0)
            continue
        share = 0.5 - (length - min(long)) / (max(long) - min(long))
        wanted.append(share if right else min(0.0, share))
    made = against_the_group(np.array(long), np.array([right for _, right in members]))
    np.testing.assert_allclose(made, wanted, rtol=0, atol=1e-12)
    assert made.max(initial=0) <= 0.5 and made.min(initial=0) >= -0.5


@given(st.lists(st.integers(1, 5000), min_size=1, max_size=8), st.integers(0, 2000), st.integers(1, 2000))
def test_what_the_equal_group_loses_is_the_old_rule_s(long, free, room):
    limit = free + room
    wanted = [1.0 - (1.0 if n <= free else 1.0 - min((n - free) / (limit - free), 1.0)) for n in long]
    np.testing.assert_allclose(beyond(np.array(long), free, limit), wanted, rtol=0, atol=1e-12)


def test_only_sampled_tokens_count():
    assert lengths(of([3, 9], [0, 1])).tolist() == [3, 9]


async def test_the_penalty_is_added_to_the_rewards_and_reported():
    transform = LengthPenalty(LengthPenaltyOptions(weight=0.2))
    [made] = await transform([of([10, 20, 30, 30], [1, 1, 1, 0])])
    np.testing.assert_allclose(made.rewards, [1.1, 1.0, 0.9, -0.1], rtol=1e-6)
    assert made.parts["raw_reward"].tolist() == [1, 1, 1, 0]
    assert transform.metrics() == pytest.approx({"mean": -0.025, "lowest": -0.1})
    assert transform.metrics() == {"mean": 0, "lowest": 0}


async def test_a_short_wrong_reply_earns_nothing():
    [made] = await LengthPenalty(LengthPenaltyOptions())([of([5, 50], [0, 1])])
    assert made.rewards.tolist() == [0, 0.5]


async def test_a_price_a_token_begins_after_the_free_ones():
    options = LengthPenaltyOptions(form="token", cost=0.01, free_tokens=20)
    [made] = await LengthPenalty(options)([of([10, 20, 45], [1, 1, 1], [None] * 3)])
    np.testing.assert_allclose(made.rewards, [1, 1, 0.75], rtol=1e-6)


@pytest.mark.parametrize(
    "transform", [LengthPenalty(LengthPenaltyOptions()), EqualGroup(EqualGroupOptions())], ids=["penalty", "equal"]
)
async def test_an_environment_that_says_nothing_of_correctness_needs_a_threshold(transform):
    with pytest.raises(DataError, match=r"environment 'sample' does not say(.|\n)*Set correct_above"):
        await transform([of([5, 50], [1, 1], [None, None])])


async def test_a_threshold_says_what_is_correct():
    [made] = await LengthPenalty(LengthPenaltyOptions(correct_above=0.5))([of([5, 50], [0.4, 0.6], [None, None])])
    np.testing.assert_allclose(made.rewards, [0.4, 0.1], rtol=1e-6)


async def test_in_a_group_that_is_right_throughout_the_length_decides():
    transform = EqualGroup(EqualGroupOptions(free_tokens=100, limit_tokens=200))
    right, wrong, mixed = of([50, 150, 300], [1, 1, 1]), of([50, 150], [0, 0]), of([50, 300], [1, 0])
    made = await transform([right, wrong, mixed, of([10, 20], [1, 1])])
    assert made[0].rewards.tolist() == [1, 0.5, 0]
    assert made[1] is wrong
    assert made[2] is mixed
    assert transform.metrics() == {"equal": 0.5, "told_apart": 0.25}
    kept = await DropFlat()(await GroupAdvantage(GroupAdvantageOptions())(made))
    assert [len(group.rewards) for group in kept] == [3, 2], "equal and short, and equal and wrong: dropped"


async def test_after_group_advantage_they_are_refused():
    made = await GroupAdvantage(GroupAdvantageOptions())([of([5, 50], [1, 1])])
    for transform in (LengthPenalty(LengthPenaltyOptions()), EqualGroup(EqualGroupOptions())):
        with pytest.raises(ConfigError, match="before group_advantage"):
            await transform(made)


def test_options_of_the_other_form_are_refused():
    with pytest.raises(ValidationError, match="has no price"):
        LengthPenaltyOptions(form="token")
    with pytest.raises(ValidationError, match='cost belongs to the other form, but form is "group"'):
        LengthPenaltyOptions(cost=1.0)
    with pytest.raises(ValidationError, match='weight belongs to the other form, but form is "token"'):
        LengthPenaltyOptions(form="token", cost=1.0, weight=2.0)
    with pytest.raises(ValidationError, match="must be below limit_tokens"):
        EqualGroupOptions(free_tokens=256)

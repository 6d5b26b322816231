"""Advantages against exact values and a float64 oracle."""

from __future__ import annotations

import statistics

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from atropos_core.advantages import group_advantages, is_flat

REWARDS = st.lists(st.floats(-100, 100, width=32), min_size=2, max_size=16)


def floats(*values: float) -> np.ndarray:
    return np.array(values, np.float32)


def test_one_success_among_four_has_the_values_of_the_formula():
    made = group_advantages(floats(0, 0, 0, 1))
    assert made.dtype == np.float32
    assert made.tolist() == floats(-0.5, -0.5, -0.5, 1.5).tolist(), "mean 1/4, deviation 1/2 with Bessel's correction"


def test_two_opposite_rewards_are_one_deviation_of_a_pair_apart():
    assert group_advantages(floats(-3, 5)).tolist() == floats(-(0.5**0.5), 0.5**0.5).tolist()


def test_without_the_deviation_advantages_are_the_distance_from_the_mean():
    assert group_advantages(floats(0, 0, 0, 1), divide_by_std=False).tolist() == [-0.25, -0.25, -0.25, 0.75]


@given(REWARDS)
def test_advantages_agree_with_exact_arithmetic(values):
    rewards = floats(*values)
    made = group_advantages(rewards).astype(np.float64)
    if is_flat(rewards):
        assert not made.any()
        return
    exact = [float(value) for value in rewards]
    mean, deviation = statistics.fmean(exact), statistics.stdev(exact)
    oracle = [(value - mean) / deviation for value in exact]
    np.testing.assert_allclose(made, oracle, rtol=1e-6, atol=1e-6 * max(1.0, abs(mean) / deviation))


@given(REWARDS)
def test_leaving_one_out_compares_each_reward_with_the_mean_of_the_others(values):
    rewards = floats(*values)
    made = group_advantages(rewards, "others").astype(np.float64)
    if is_flat(rewards):
        assert not made.any()
        return
    exact = [float(value) for value in rewards]
    oracle = [value - statistics.fmean(exact[:i] + exact[i + 1 :]) for i, value in enumerate(exact)]
    np.testing.assert_allclose(made, oracle, rtol=1e-6, atol=1e-4)
    centred = group_advantages(rewards, divide_by_std=False).astype(np.float64)
    np.testing.assert_allclose(made, centred * len(exact) / (len(exact) - 1), rtol=1e-5, atol=1e-4)


@given(REWARDS)
def test_without_a_baseline_an_advantage_is_the_reward(values):
    assert group_advantages(floats(*values), "none").tolist() == floats(*values).tolist()
    assert group_advantages(floats(1, 1), "none").tolist() == [1, 1], "flat groups too"


@pytest.mark.parametrize("baseline", ["group", "others", "none"])
@pytest.mark.parametrize("rewards", [[1.0, 1.0], [0.0, 1.0]])
def test_advantages_are_of_the_rewards_own_kind(baseline, rewards):
    assert group_advantages(floats(*rewards), baseline).dtype == np.float32
    assert group_advantages(np.array(rewards), baseline).dtype == np.float32


@given(REWARDS, st.integers(-3, 3), st.sampled_from([0.5, 2.0, 4.0]))
def test_a_shift_or_a_scale_of_all_rewards_changes_no_advantage(values, shift, scale):
    rewards = np.round(floats(*values) * 8) / 8  # exact under both operations
    moved = (rewards * np.float32(scale) + np.float32(shift)).astype(np.float32)
    if is_flat(rewards) or is_flat(moved):
        return
    np.testing.assert_allclose(group_advantages(moved), group_advantages(rewards), rtol=1e-5, atol=1e-5)


@given(REWARDS)
def test_advantages_of_a_group_add_up_to_nothing(values):
    assert abs(float(group_advantages(floats(*values)).astype(np.float64).sum())) < 1e-3


@pytest.mark.parametrize("rewards", [[], [5.0], [0.0, 0.0], [1.0] * 7, [-2.5] * 3, [1e6] * 4, [0.1, 0.1, 0.1]])
def test_equal_rewards_and_a_group_of_one_get_exactly_zero(rewards):
    made = group_advantages(floats(*rewards))
    assert made.tolist() == [0.0] * len(rewards)
    assert group_advantages(floats(*rewards), divide_by_std=False).tolist() == [0.0] * len(rewards)
    assert group_advantages(floats(*rewards), "others").tolist() == [0.0] * len(rewards)


@pytest.mark.parametrize(
    ("rewards", "flat"),
    [
        ([0.0, 1.40e-6], True),  # deviation 0.99e-6: a millionth of 1 is the bound where all are smaller
        ([0.0, 1.43e-6], False),  # deviation 1.01e-6
        ([1000.0, 1000.0013], True),  # deviation 0.0009, and the bound is a millionth of 1000
        ([1000.0, 1000.0016], False),  # deviation 0.0011
        ([-1000.0, -1000.0013], True),  # the bound goes by size, not by sign
        ([0.0, 1.0], False),
    ],
)
def test_flat_begins_at_the_stated_bounds(rewards, flat):
    assert is_flat(floats(*rewards)) is flat


def test_a_difference_far_above_rounding_is_no_noise_though_all_rewards_are_large():
    made = group_advantages(floats(100, 100, 100, 100.01))
    assert made.tolist() == pytest.approx([-0.5, -0.5, -0.5, 1.5], abs=1e-3)
    assert group_advantages(floats(100, 100, 100, 100.01), "others")[3] == pytest.approx(0.01, abs=1e-5)


@pytest.mark.parametrize("size", [1.0, 100.0, 1e4, 1e8])
def test_rewards_that_differ_by_what_float32_rounds_are_flat_at_every_size(size):
    rewards = np.float32(size) + np.spacing(np.float32(size)) * np.arange(5, dtype=np.float32)
    assert len(set(rewards.tolist())) == 5
    assert is_flat(rewards)


def test_noise_in_the_last_digit_is_not_blown_up_to_full_advantages():
    rewards = floats(0.3, 0.3, np.nextafter(np.float32(0.3), np.float32(1)))
    assert group_advantages(rewards).tolist() == [0.0, 0.0, 0.0]


def test_rewards_are_not_changed_in_place():
    rewards = floats(1, 2, 3)
    group_advantages(rewards)
    assert rewards.tolist() == [1, 2, 3]

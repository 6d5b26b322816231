"""The estimators: exact where their page says so, and equal to their papers' formulas written out."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atropos_credit.gae import turn_gae
from atropos_credit.gigpo import gigpo
from atropos_credit.kit import WORLDS, expected_score, listed, measured
from atropos_credit.maxrl import maxrl_advantages
from atropos_credit.returns import turn_returns
from atropos_credit.turns import Turns, returns

EXACT = 1e-9
TASKS = ("fixed", "stopping", "rooms")


@pytest.mark.parametrize("baseline", ["others", "state", "none"])
@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("world", TASKS)
def test_returns_against_other_episodes_are_the_gradient_of_the_expected_score(world, seed, baseline):
    found = measured(partial(turn_returns, baseline=baseline), listed(WORLDS[world], seed), group_size=3)
    assert found.bias < EXACT


@pytest.mark.parametrize("group_size", [2, 4])
def test_the_default_is_exact_for_other_sizes_of_groups(group_size):
    assert measured(turn_returns, listed(WORLDS["stopping"]), group_size=group_size).bias < EXACT


@pytest.mark.parametrize("estimator", [turn_returns, partial(turn_gae, gae_lambda=1.0)])
def test_weights_are_those_of_the_objective(estimator):
    weights = {"outcome_weight": 2.0, "turn_weight": 0.25}
    found = measured(partial(estimator, **weights), listed(WORLDS["rooms"]), expected_score(**weights), group_size=2)
    assert found.bias < EXACT
    assert measured(partial(estimator, **weights), listed(WORLDS["rooms"]), group_size=2).bias > 0.01


@pytest.mark.parametrize(
    "estimator",
    [
        partial(turn_returns, baseline="group"), partial(turn_returns, baseline="group", divide_by_std=True),
        partial(turn_returns, discount=0.9), turn_gae, gigpo, partial(gigpo, divide_by_std=True),
    ],
)  # fmt: skip
@pytest.mark.parametrize("world", ["stopping", "rooms"])
def test_what_the_page_calls_biased_is(estimator, world):
    assert measured(estimator, listed(WORLDS[world]), group_size=2).turned > 1e-3


def group_of(given):
    return [
        Turns(np.array([reward for reward, _ in turns], float), outcome, tuple(state for _, state in turns))
        for turns, outcome in given
    ]


REWARD = st.floats(-8, 8, allow_nan=False)
GROUPS = st.lists(
    st.tuples(st.lists(st.tuples(REWARD, st.integers(0, 3)), max_size=4), REWARD), min_size=1, max_size=5
).map(group_of)


@settings(max_examples=100)
@given(group=GROUPS, discount=st.sampled_from([1.0, 0.9, 0.5]), baseline=st.sampled_from(["others", "state", "group"]))
def test_turn_returns_equal_the_formula_one_turn_at_a_time(group, discount, baseline):
    earned = [one.earned() for one in group]
    every = [[sum(discount ** (k - t) * r[k] for k in range(t, len(r))) for t in range(len(r))] for r in earned]
    for i, values in enumerate(turn_returns(group, baseline, discount=discount)):
        others = [j for j in range(len(group)) if j != i]
        for t, value in enumerate(values):
            if not others:
                assert value == 0
                continue
            if baseline == "group":
                base = np.mean([one[t] for one in every if len(one) > t])
            else:
                longest = max(len(every[j]) for j in others)
                at = min(t, longest - 1)
                base = np.mean([every[j][at] for j in others if len(every[j]) > at]) if longest else 0.0
                same = [
                    every[j][k]
                    for j in others
                    for k, state in enumerate(group[j].states)
                    if state == group[i].states[t]
                ]
                if baseline == "state" and same:
                    base = np.mean(same)
            assert value == pytest.approx(every[i][t] - base, abs=1e-9)


@settings(max_examples=100)
@given(group=GROUPS, discount=st.sampled_from([1.0, 0.9]), gae_lambda=st.sampled_from([0.0, 0.5, 0.95, 1.0]))
def test_turn_gae_is_the_sum_of_td_errors_where_the_others_reach_every_turn(group, discount, gae_lambda):
    longest = Turns(np.ones(4), 1.0, tuple("abcd"))
    group = [*group, longest]
    every = [returns(one.earned(), discount) for one in group]
    made = turn_gae(group, gae_lambda=gae_lambda, discount=discount)
    for i, one in enumerate(group[:-1]):
        others = [every[j] for j in range(len(group)) if j != i]
        r, turns = one.earned(), len(one.rewards)
        value = [np.mean([other[t] for other in others if len(other) > t]) for t in range(turns)] + [0.0]
        errors = [r[t] + discount * value[t + 1] - value[t] for t in range(turns)]
        for t in range(turns):
            wanted = sum((discount * gae_lambda) ** (k - t) * errors[k] for k in range(t, turns))
            assert made[i][t] == pytest.approx(wanted, abs=1e-9)


@settings(max_examples=50)
@given(group=GROUPS, discount=st.sampled_from([1.0, 0.9]))
def test_turn_gae_that_bootstraps_nothing_is_turn_returns(group, discount):
    pairs = zip(turn_gae(group, gae_lambda=1.0, discount=discount), turn_returns(group, discount=discount), strict=True)
    for one, other in pairs:
        np.testing.assert_allclose(one, other, atol=1e-9)


def test_without_another_episode_at_the_next_turn_nothing_is_bootstrapped():
    group = [Turns(np.array([1.0, 2.0, 4.0])), Turns(np.array([3.0]))]
    [made, _] = turn_gae(group, gae_lambda=0.0)
    assert made.tolist() == [7.0 - 3.0, 6.0 - 3.0, 4.0 - 3.0]


@settings(max_examples=100)
@given(group=GROUPS, divide=st.booleans(), weight=st.sampled_from([0.5, 1.0]))
def test_gigpo_is_the_papers_two_comparisons(group, divide, weight):
    def compared(value, values):
        if not divide or len(values) < 2:
            return value - np.mean(values)
        return (value - np.mean(values)) / np.std(values, ddof=1) if np.std(values, ddof=1) > 1e-5 else 0.0

    every = [returns(one.earned(), 0.95) for one in group]
    scores = [one.score for one in group]
    for i, values in enumerate(gigpo(group, step_weight=weight, divide_by_std=divide)):
        for t, value in enumerate(values):
            same = [
                every[j][k] for j, one in enumerate(group) for k, s in enumerate(one.states) if s == group[i].states[t]
            ]
            if divide and any(0 < np.std(v, ddof=1) < 1e-4 for v in (scores, same) if len(v) > 1):
                continue  # near what counts as noise
            wanted = compared(scores[i], scores) + weight * compared(every[i][t], same)
            assert value == pytest.approx(wanted, abs=1e-6)


def test_maxrl_divides_by_the_share_of_right_replies():
    assert maxrl_advantages(np.array([True, False, False, False])).tolist() == [3.0, -1.0, -1.0, -1.0]
    assert maxrl_advantages(np.array([False, False])).tolist() == [0.0, 0.0]
    assert maxrl_advantages(np.array([True, True])).tolist() == [0.0, 0.0]
    assert maxrl_advantages(np.zeros(0, bool)).tolist() == []

"""The transforms on groups of rollouts: which tokens get which advantage, and that they train what the estimators promise."""

from __future__ import annotations

import asyncio
import re
from dataclasses import astuple, replace
from functools import partial

import numpy as np
import pytest
from pydantic import ValidationError

from atropos_core.builtin.config import GroupAdvantageOptions
from atropos_core.builtin.transforms import DropFlat, GroupAdvantage
from atropos_core.errors import DataError
from atropos_core.turn_rewards import turn_rewards
from atropos_core.types import Episode, Rollout
from atropos_credit.config import GigpoOptions, MaxRlOptions, TurnGaeOptions, TurnReturnsOptions
from atropos_credit.gae import turn_gae
from atropos_credit.gigpo import gigpo
from atropos_credit.kit import WORLDS, listed, measured
from atropos_credit.kit.table import percent
from atropos_credit.placed import digest, spans_of, turns_of
from atropos_credit.returns import turn_returns
from atropos_credit.transforms import MaxRl, gigpo_transform, turn_gae_transform, turn_returns_transform
from atropos_testing import transform_contract
from atropos_testing.samples import make_group
from tests.conftest import REPOSITORY

test_turn_returns_contract = transform_contract("turn_returns")
test_turn_returns_contract_by_state = transform_contract(
    "turn_returns", options={"baseline": "state", "state": "history"}
)
test_turn_gae_contract = transform_contract("turn_gae")
test_gigpo_contract = transform_contract("gigpo")
test_maxrl_contract = transform_contract("maxrl")


def rollout(layout, rewards=None, **more):
    """A rollout whose tokens are the letters' numbers: upper case was sampled. `rewards`: by the position after a span."""
    sampled = np.array([letter.isupper() for letter in layout])
    return Rollout(
        tokens=np.array([ord(letter.lower()) for letter in layout], np.int32),
        sampled=sampled,
        trained=more.pop("trained", sampled),
        logprobs=np.where(sampled, -0.5, 0.0).astype(np.float32),
        policy_version=np.zeros(len(layout), np.int32),
        temperature=1.0,
        turns=None if rewards is None else turn_rewards(list(rewards), list(rewards.values())),
        **more,
    )


def group_of(*episodes):
    """A group of episodes, each a total and its rollouts."""
    group = make_group(0, [total for total, *_ in episodes])
    return replace(group, episodes=tuple(Episode(tuple(rollouts), total) for total, *rollouts in episodes))


def applied(transform, *groups):
    return list(asyncio.run(transform(groups)))


def test_a_turn_is_a_span_with_a_reward_or_a_run_of_sampled_tokens():
    one = Episode((rollout("ppABtCtDEtF", {3: 1.0, 4: 2.0, 6: -1.0}), rollout("qGrH")), 0.0)
    assert [tuple(span) for span in spans_of(one)] == [
        (0, 0, 2, 3, 1.0, 1), (0, 3, 3, 4, 2.0, 1), (0, 4, 5, 6, -1.0, 1), (0, 6, 7, 9, 0.0, 2), (0, 9, 10, 11, 0.0, 1),
        (1, 0, 1, 2, 0.0, 1), (1, 2, 3, 4, 0.0, 1),
    ]  # fmt: skip


def test_a_turn_without_a_reward_is_a_turn_whatever_is_earned_later():
    one = Episode((rollout("pAtBCtD", {5: 1.0}),), 0.0)
    assert [tuple(span) for span in spans_of(one)] == [(0, 0, 1, 2, 0.0, 1), (0, 2, 3, 5, 1.0, 2), (0, 5, 6, 7, 0.0, 1)]
    [made] = applied(turn_returns_transform(TurnReturnsOptions(baseline="none")), group_of((1.0, *one.rollouts)))
    assert made.episodes[0].rollouts[0].advantages.tolist() == [0, 1, 0, 1, 1, 0, 0]


def test_the_outcome_is_what_the_total_has_beyond_the_rewards_of_turns():
    [first, second] = turns_of(group_of((5.0, rollout("pAtB", {2: 1.0, 4: 0.5})), (2.0, rollout("pAtB"))))
    assert (first.rewards.tolist(), first.outcome, first.lengths) == ([1.0, 0.5], 3.5, (1, 1))
    assert (second.rewards.tolist(), second.outcome) == ([0.0, 0.0], 2.0)


def test_states_are_what_a_turn_was_shown_or_all_before_it():
    group = group_of(
        (0.0, rollout("pAtBtC")), (0.0, rollout("pBtA")), (0.0, rollout("qABtC", {2: 1.0, 3: 1.0, 5: 1.0}))
    )
    for state, shown in (
        ("observation", [["p", "t", "t"], ["p", "t"], ["q", "qa", "t"]]),
        ("history", [["p", "pat", "patbt"], ["p", "pbt"], ["q", "qa", "qabt"]]),
    ):
        expected = [[digest(rollout(letters).tokens) for letters in one] for one in shown]
        assert [list(one.states) for one in turns_of(group, state)] == expected


def test_each_sampled_token_has_the_advantage_of_its_turn_and_no_other_token_any():
    group = group_of(
        (4.0, rollout("ppABtC", {4: 1.0, 6: 2.0})), (1.0, rollout("ppAtBC", {3: 1.0, 6: 0.0})), (0.0, rollout("pA"))
    )
    [made] = applied(turn_returns_transform(TurnReturnsOptions()), group)
    # Returns: 4, 3 with an outcome of 1; 1, 0; 0. Against the others: 4 - 1/2, 3 - 0; 1 - 2, 0 - 3; 0 - 5/2.
    columns = [one.advantages.tolist() for episode in made.episodes for one in episode.rollouts]
    assert columns == [[0, 0, 3.5, 3.5, 0, 3], [0, 0, -1, 0, -3, -3], [0, -2.5]]
    assert made.advantages.tolist() == pytest.approx([(3.5 + 3.5 + 3) / 3, (-1 - 3 - 3) / 3, -2.5])
    assert made.rewards.tolist() == group.rewards.tolist()


def test_rollouts_and_groups_that_came_with_advantages_keep_them():
    own = np.array([0, 7.0], np.float32)
    group = group_of((1.0, rollout("pA", advantages=own)), (0.0, rollout("pA")))
    [made] = applied(turn_returns_transform(TurnReturnsOptions()), group)
    assert made.episodes[0].rollouts[0].advantages is own
    assert made.episodes[1].rollouts[0].advantages.tolist() == [0, -1]
    given = group.with_advantages(np.array([1.0, 2.0]))
    for transform in (turn_returns_transform(TurnReturnsOptions()), MaxRl(MaxRlOptions(correct_above=0))):
        assert applied(transform, given) == [given]


def test_an_episode_without_a_sampled_token_is_left_out():
    group = group_of((1.0, rollout("pp")), (0.0, rollout("pA")), (2.0, rollout("pA")))
    [made] = applied(turn_returns_transform(TurnReturnsOptions()), group)
    assert [one.advantages.tolist() for e in made.episodes for one in e.rollouts] == [[0, 0], [0, -2], [0, 2]]
    assert made.advantages.tolist() == [0, -2, 2]


def test_splitting_an_episode_into_rollouts_changes_no_advantage():
    whole = group_of((4.0, rollout("pAtB", {2: 1.0, 4: 2.0})), (1.0, rollout("pAtB", {2: 0.5, 4: 0.0})))
    split = group_of((4.0, rollout("pA", {2: 1.0}), rollout("tB", {2: 2.0})), (1.0, rollout("pAtB", {2: 0.5, 4: 0.0})))
    for transform in (
        turn_returns_transform(TurnReturnsOptions()),
        turn_gae_transform(TurnGaeOptions()),
        gigpo_transform(GigpoOptions()),
    ):
        one, other = applied(transform, whole, split)
        joined = [np.concatenate([r.advantages for r in e.rollouts]).tolist() for e in other.episodes]
        assert joined == [e.rollouts[0].advantages.tolist() for e in one.episodes]


def test_without_rewards_of_turns_the_default_is_rloo_and_flat_groups_are_dropped():
    group, flat, rounded = (
        make_group(0, (0.0, 1.0, 0.5, 0.25)),
        make_group(1, (1.0, 1.0)),
        make_group(2, (0.3, 0.3 + 1e-7)),
    )
    [made] = applied(turn_returns_transform(TurnReturnsOptions()), group)
    [expected] = applied(GroupAdvantage(GroupAdvantageOptions(baseline="others")), group)
    np.testing.assert_allclose(made.advantages, expected.advantages, atol=1e-7)
    for episode, value in zip(made.episodes, expected.advantages, strict=True):
        [one] = episode.rollouts
        np.testing.assert_allclose(one.advantages[one.sampled], value, atol=1e-7)
    credited = applied(turn_returns_transform(TurnReturnsOptions()), group, flat, rounded)
    assert applied(DropFlat(), *credited) == credited[:1]


def test_a_group_with_equal_totals_is_kept_if_its_turns_differ():
    group = group_of((1.0, rollout("pAtB", {2: 1.0})), (1.0, rollout("pAtB", {4: 1.0})))
    credited = applied(turn_returns_transform(TurnReturnsOptions()), group)
    assert applied(DropFlat(), *credited) == credited
    assert credited[0].episodes[0].rollouts[0].advantages.tolist() == [0, 0, 0, -1]


@pytest.mark.parametrize(
    ("transform", "estimator"),
    [
        (turn_returns_transform(TurnReturnsOptions()), turn_returns),
        (turn_returns_transform(TurnReturnsOptions(baseline="state")), partial(turn_returns, baseline="state")),
        (turn_gae_transform(TurnGaeOptions(gae_lambda=0.5)), partial(turn_gae, gae_lambda=0.5)),
        (gigpo_transform(GigpoOptions(step_weight=0.5)), partial(gigpo, step_weight=0.5)),
    ],
)
def test_the_expected_gradient_of_the_advantages_at_tokens_is_that_of_the_estimator(transform, estimator):
    """Each episode of the kit is written as tokens, given to the transform with its group, and read back."""

    def at_tokens(group):
        episodes = []
        for turns in group:
            layout, ends = "", {}
            for state, length, value in zip(turns.states, turns.lengths, turns.rewards, strict=True):
                layout += "xyz"[state] + "S" * length
                ends[len(layout)] = value
            episodes.append((turns.score, rollout(layout, ends)))
        [made] = applied(transform, group_of(*episodes))
        return [one.advantages[one.sampled] for episode in made.episodes for one in episode.rollouts]

    policy = listed(WORLDS["rooms"])
    found, expected = (measured(one, policy, group_size=2) for one in (at_tokens, estimator))
    assert astuple(found) == pytest.approx(astuple(expected), abs=1e-6)  # advantages at tokens have 32 bits


def interleaved(group, with_order):
    """The group as an agent's: a main history with the first and the third turn, and one of a sub-agent with the second."""
    episodes = []
    for turns in group:
        histories = [("", {}, []), ("", {}, [])]
        for at, (length, value) in enumerate(zip(turns.lengths, turns.rewards, strict=True)):
            layout, ends, order = histories[at % 2]
            layout += "p" + "S" * length
            histories[at % 2] = layout, {**ends, len(layout): value}, [*order, at]
        rollouts = [
            replace(rollout(layout, ends), turn_order=np.array(order, np.int64) if with_order else None)
            for layout, ends, order in histories
            if layout
        ]
        episodes.append((turns.score, *rollouts))
    return group_of(*episodes)


@pytest.mark.parametrize(("world", "bias"), [("stopping", "5.2 %"), ("rooms", "17 %")])
def test_histories_that_were_sampled_in_turns_have_no_bias_in_the_order_of_time_and_that_of_the_page_without(
    world, bias
):
    found = {}
    for with_order in (True, False):

        def at_tokens(group, with_order=with_order):
            [made] = applied(turn_returns_transform(TurnReturnsOptions()), interleaved(group, with_order))
            columns = []
            for turns, episode in zip(group, made.episodes, strict=True):
                spans = [iter(np.split(one.advantages, np.flatnonzero(~one.sampled))[1:]) for one in episode.rollouts]
                columns.append(np.concatenate([next(spans[at % 2])[1:] for at in range(len(turns.lengths))]))
            return columns

        found[with_order] = measured(at_tokens, listed(WORLDS[world]), group_size=2)
    assert found[True].bias < 1e-6  # advantages at tokens have 32 bits
    assert percent(found[False].bias) == bias and found[False].turned > 0.04
    page = re.sub(r"\s+", " ", (REPOSITORY / "docs/credit.md").read_text())
    assert f"{bias} in `{world}`" in page


STATES = {"baseline": "state"}


@pytest.mark.parametrize(
    ("make", "options", "plain", "changed"),
    [
        (turn_returns_transform, TurnReturnsOptions, {}, {"discount": 0.5}),
        (turn_returns_transform, TurnReturnsOptions, {}, {"turn_weight": 0.5}),
        (turn_returns_transform, TurnReturnsOptions, STATES, {**STATES, "state": "history"}),
        (turn_gae_transform, TurnGaeOptions, {}, {"discount": 0.5}),
        (turn_gae_transform, TurnGaeOptions, {}, {"turn_weight": 0.5}),
        (turn_gae_transform, TurnGaeOptions, {}, {"gae_lambda": 0.5}),
        (gigpo_transform, GigpoOptions, {}, {"discount": 0.5}),
        (gigpo_transform, GigpoOptions, {}, {"state": "history"}),
    ],
)
def test_options_that_groups_of_one_turn_do_not_show_change_advantages_of_several(make, options, plain, changed):
    group = group_of(
        (4.0, rollout("pAtBtC", {2: 1.0, 4: 2.0, 6: 0.5})), (1.0, rollout("pAtBtA", {2: 0.5, 4: 0.0, 6: -1.0}))
    )
    [one], [other] = (applied(make(options(**values)), group) for values in (plain, changed))
    columns = [[e.rollouts[0].advantages.tolist() for e in made.episodes] for made in (one, other)]
    assert columns[0] != columns[1]


def test_metrics_say_how_many_turns_there_were_and_whether_states_were_met_again():
    transform = gigpo_transform(GigpoOptions())
    applied(transform, group_of((3.0, rollout("pAtB", {2: 1.0, 4: 0.0})), (0.0, rollout("pA"))))
    assert transform.metrics() == {"turns": 1.5, "rewarded": pytest.approx(1 / 3), "met_again": pytest.approx(2 / 3)}
    assert transform.metrics() == {"turns": 0.0, "rewarded": 0.0, "met_again": 0.0}


def test_maxrl_asks_the_environment_which_replies_are_correct_or_an_option():
    group = make_group(0, (0.25, 1.0, 0.0, -1.0))
    assert applied(MaxRl(MaxRlOptions()), group)[0].advantages.tolist() == [1, 1, -1, -1]
    assert applied(MaxRl(MaxRlOptions(correct_above=0.5)), group)[0].advantages.tolist() == [-1, 3, -1, -1]
    unsaid = replace(group, episodes=tuple(replace(one, correct=None) for one in group.episodes))
    with pytest.raises(DataError, match=r"needs to know which replies are correct.*\n?.*correct_above"):
        applied(MaxRl(MaxRlOptions()), unsaid)


@pytest.mark.parametrize(
    ("options", "values", "error"),
    [
        (TurnReturnsOptions, {"divide_by_std": True}, "divide_by_std has no effect with baseline"),
        (TurnReturnsOptions, {"state": "history"}, "state has no effect with baseline"),
        (TurnReturnsOptions, {"outcome_weight": 0, "turn_weight": 0}, "leave no reward"),
        (TurnGaeOptions, {"outcome_weight": 0, "turn_weight": 0}, "leave no reward"),
        (TurnReturnsOptions, {"discount": 1.1}, "less than or equal to 1"),
        (TurnGaeOptions, {"gae_lambda": -0.1}, "greater than or equal to 0"),
        (GigpoOptions, {"step_weight": 0}, "greater than 0"),
    ],
)
def test_options_without_an_effect_or_out_of_range_are_refused(options, values, error):
    with pytest.raises(ValidationError, match=error):
        options(**values)

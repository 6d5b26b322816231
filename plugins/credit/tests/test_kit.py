"""The kit against finite differences, brute force over ordered groups, and closed forms."""

from __future__ import annotations

from functools import partial
from itertools import product

import numpy as np
import pytest
import torch

from atropos_core.errors import DataError
from atropos_credit.kit import WORLDS, by_rows, by_scores, expected_score, likelihood, listed, measured
from atropos_credit.kit.known import centred_then_summed, episode_baseline
from atropos_credit.maxrl import maxrl
from atropos_credit.returns import turn_returns
from atropos_credit.turns import Turns

EXACT = 1e-9


@pytest.mark.parametrize("name", WORLDS)
def test_episodes_are_all_there_and_their_scores_are_the_slopes_of_their_log_probabilities(name):
    policy = listed(WORLDS[name], seed=3)
    assert policy.probabilities.sum() == pytest.approx(1.0, abs=1e-12)
    size = policy.scores[0].shape[1]
    logits, step = np.random.default_rng(3).normal(size=size), 1e-5
    for parameter in range(size):
        at = np.zeros(size)
        at[parameter] = step
        above, below = (np.log(listed(WORLDS[name], logits=logits + sign * at).probabilities) for sign in (1, -1))
        slopes = (above - below) / (2 * step)
        np.testing.assert_allclose([score.sum(0)[parameter] for score in policy.scores], slopes, atol=1e-8)


@pytest.mark.parametrize("name", WORLDS)
@pytest.mark.parametrize(
    ("value", "objective"),
    [
        (lambda one: one.score, expected_score()),
        (lambda one: (0.9 ** np.arange(len(one.rewards)) * one.earned()).sum(), expected_score(discount=0.9)),
        (lambda one: 3 * one.outcome + 0.5 * one.rewards.sum(), expected_score(outcome_weight=3, turn_weight=0.5)),
    ],
)
def test_the_gradient_of_an_expected_value_is_its_slope(name, value, objective):
    policy = listed(WORLDS[name], seed=1)
    values = np.array([value(one) for one in policy.episodes])
    size, step = policy.scores[0].shape[1], 1e-5
    logits = np.random.default_rng(1).normal(size=size)
    slopes = []
    for parameter in range(size):
        at = np.zeros(size)
        at[parameter] = step
        above, below = (listed(WORLDS[name], logits=logits + sign * at).probabilities @ values for sign in (1, -1))
        slopes.append((above - below) / (2 * step))
    np.testing.assert_allclose(objective(policy), slopes, atol=1e-8)


def test_the_first_terms_of_log_p_have_their_slope():
    size, step = listed(WORLDS["answer"]).scores[0].shape[1], 1e-5
    logits = np.random.default_rng(2).normal(size=size)

    def value(logits, order):
        policy = listed(WORLDS["answer"], logits=logits)
        failed = 1 - sum(p for p, one in zip(policy.probabilities, policy.episodes, strict=True) if one.score > 0)
        return -sum(failed**k / k for k in range(1, order + 1))

    for order in (1, 2, 5):
        slopes = [
            (value(logits + step * at, order) - value(logits - step * at, order)) / (2 * step) for at in np.eye(size)
        ]
        np.testing.assert_allclose(likelihood(order)(listed(WORLDS["answer"], logits=logits)), slopes, atol=1e-8)


@pytest.mark.parametrize("average", ["sum", "sequence", "token"])
def test_groups_without_regard_to_order_have_the_expectation_of_all_ordered_groups(average):
    policy = listed(WORLDS["fixed"], seed=0)
    true, mean, square = expected_score()(policy), 0.0, 0.0
    for members in product(range(len(policy.episodes)), repeat=3):
        chance = np.prod(policy.probabilities[list(members)])
        group = [policy.episodes[member] for member in members]
        lengths = [sum(one.lengths) for one in group]
        gradient = 0.0
        for member, one, values in zip(members, group, turn_returns(group, "group"), strict=True):
            weight = {"sum": 3, "sequence": 3 * sum(one.lengths), "token": sum(lengths)}[average]
            token = 0
            for value, length in zip(values, one.lengths, strict=True):
                gradient = gradient + value * policy.scores[member][token : token + length].sum(0) / weight
                token += length
        mean, square = mean + chance * gradient, square + chance * (gradient @ gradient)
    found = measured(partial(turn_returns, baseline="group"), policy, average=average)
    size = np.linalg.norm(true)
    assert found.bias == pytest.approx(np.linalg.norm(mean - true) / size, abs=1e-12)
    assert found.scale == pytest.approx(mean @ true / size**2, abs=1e-12)
    assert found.turned == pytest.approx(np.linalg.norm(mean / found.scale - true) / size, abs=1e-12)
    assert found.noise == pytest.approx(np.sqrt(square - mean @ mean) / size / found.scale, abs=1e-12)


@pytest.mark.parametrize("group_size", [2, 3, 4])
def test_a_mean_that_includes_the_episode_itself_shrinks_its_gradient_by_one_part_in_its_size(group_size):
    found = measured(partial(episode_baseline, baseline="group"), listed(WORLDS["fixed"]), group_size=group_size)
    assert found.scale == pytest.approx((group_size - 1) / group_size, abs=1e-12)
    assert found.turned < EXACT


def test_rewards_centred_at_each_turn_and_summed_are_charged_to_those_who_go_on():
    """If every episode has two turns, that is the gradient, only shrunk; if the policy decides when to stop, it is not."""
    assert measured(centred_then_summed, listed(WORLDS["fixed"]), group_size=2).turned < EXACT
    assert measured(centred_then_summed, listed(WORLDS["stopping"]), group_size=2).turned > 0.1


@pytest.mark.parametrize("group_size", [2, 3, 5])
def test_maxrl_has_the_gradient_of_one_term_of_log_p_fewer_than_the_group_has_replies(group_size):
    policy = listed(WORLDS["answer"], seed=4)
    assert measured(maxrl, policy, likelihood(group_size - 1), group_size=group_size).bias < EXACT
    assert measured(maxrl, policy, likelihood(group_size), group_size=group_size).bias > 0.01
    without_mean = lambda group: [  # noqa: E731
        np.full(1, one.score * len(group) / max(sum(other.score for other in group), 1)) for one in group
    ]
    assert measured(without_mean, policy, likelihood(group_size), group_size=group_size).bias < EXACT


def test_rows_have_rewards_at_the_last_token_of_each_turn_and_a_token_of_the_environment_between():
    seen = {}

    def function(token_level_rewards, response_mask, index, scale):
        seen.update(rewards=token_level_rewards, mask=response_mask, index=list(index))
        return scale * torch.arange(token_level_rewards.numel()).reshape(token_level_rewards.shape), None

    group = [Turns(np.array([1.0, 2.0]), 0.5, lengths=(2, 1)), Turns(np.array([4.0]), lengths=(1,))]
    made = by_rows(function, scale=10)(group)
    assert seen["rewards"].tolist() == [[0, 1, 0, 2.5], [4, 0, 0, 0]]
    assert seen["mask"].tolist() == [[1, 1, 0, 1], [1, 0, 0, 0]]
    assert seen["index"] == ["task", "task"]
    assert [values.tolist() for values in made] == [[0, 10, 30], [40]]


def test_a_function_of_scores_gives_each_turn_its_episodes_advantage():
    others = lambda scores: scores - (scores.sum() - scores) / (len(scores) - 1)  # noqa: E731
    assert measured(by_scores(others), listed(WORLDS["rooms"]), group_size=2).bias < EXACT
    with pytest.raises(DataError, match=r"a function of 2 scores returned an array of shape \(\)"):
        measured(by_scores(np.mean), listed(WORLDS["rooms"]), group_size=2)


def test_an_estimator_over_rows_is_measured_token_by_token():
    def rloo(token_level_rewards, response_mask, index):
        scores = token_level_rewards.sum(-1)
        others = (scores.sum() - scores) / (len(scores) - 1)
        return (scores - others).unsqueeze(-1) * response_mask, None

    assert measured(by_rows(rloo), listed(WORLDS["stopping"]), group_size=2).bias < EXACT


@pytest.mark.parametrize(
    ("estimator", "error"),
    [
        (lambda group: [np.zeros(1)], "returned 1 arrays for 2 episodes"),
        (lambda group: [np.zeros(7) for _ in group], "array of shape .7,. for an episode of"),
        (lambda group: [one.rewards / 0.0 for one in group], "not all finite"),
        (lambda group: [one.rewards * at for at, one in enumerate(group)], "in the reverse order"),
    ],
)
def test_an_estimator_that_cannot_be_measured_is_refused(estimator, error):
    with np.errstate(all="ignore"), pytest.raises(DataError, match=error):
        measured(estimator, listed(WORLDS["stopping"]), group_size=2)

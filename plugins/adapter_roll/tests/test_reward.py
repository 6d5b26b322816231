"""The reward bridge: known texts give known parts, and no bonus puts a wrong answer before a right one."""

import logging
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from atropos_adapter_roll.config import RewardOptions
from atropos_adapter_roll.reward import has_marker, parts_of, turns_of, warn_of_wrong_replies_ahead
from atropos_core.turn_rewards import turn_rewards
from atropos_core.types import Episode, Rollout, tokens


def options(**given):
    return RewardOptions.model_validate(given)


def episode(score, correct):
    return Episode((), score, correct)


BOTH = {
    "format": {"weight": 0.2, "markers": ["<think>", "\\boxed{}"]},
    "length": {"weight": 0.5, "at_least": 2, "free": 10, "limit": 30},
}


@pytest.mark.parametrize(
    ("text", "marker", "has"),
    [
        ("<think>so</think> 4", "<think>", True),
        ("<think> \n </think> 4", "<think>", False),
        ("<think>so", "<think>", False),
        ("</think>so<think>", "<think>", False),
        ("<think></think><think>x</think>", "<think>", True),
        ("it is \\boxed{4}", "\\boxed{}", True),
        ("it is \\boxed{}", "\\boxed{}", False),
        ("it is \\boxed{ }", "\\boxed{}", False),
        ("it is boxed{4}", "\\boxed{}", False),
        ("a\n#### 4", "####", True),
        ("4.", "####", False),
        ("the 4th\nof 5", "/of \\d$/", True),
        ("the 4th of", "/of \\d$/", False),
        ("a/b", "/", True),
    ],
)
def test_a_marker_is_found_where_its_form_says(text, marker, has):
    assert has_marker(text, marker) is has


@pytest.mark.parametrize(
    ("reply", "score", "correct", "parts"),
    [
        ("<think>2+2</think>\\boxed{4}", 1.0, True, {"environment": 1.0, "format": 0.2, "length": 0.5 * 3 / 20}),
        ("\\boxed{4}", 1.0, True, {"environment": 1.0, "format": 0.1, "length": 0.5}),
        ("x" * 20, 1.0, True, {"environment": 1.0, "format": 0.0, "length": 0.25}),
        ("x" * 20, 0.0, False, {"environment": 0.0, "format": -0.2, "length": -0.25}),
        ("<think>a</think>\\boxed{5}", 0.0, False, {"environment": 0.0, "format": 0.0, "length": 0.5 * (5 / 20 - 1)}),
        ("x", 1.0, True, {"environment": 1.0, "format": 0.0, "length": 0.0}),
        ("x" * 20, 0.4, None, {"environment": 0.4, "format": 0.0, "length": 0.25}),
    ],
)
def test_known_texts_give_known_parts(reply, score, correct, parts):
    assert parts_of(options(**BOTH), episode(score, correct), [reply]) == pytest.approx(parts)


def test_marks_are_looked_for_in_the_last_reply_and_length_counts_all():
    found = parts_of(options(**BOTH), episode(1.0, True), ["\\boxed{1}" + "x" * 6, "y" * 5])
    assert found == pytest.approx({"environment": 1.0, "format": 0.0, "length": 0.25})


def test_the_environments_score_has_its_weight():
    assert parts_of(options(environment=3.0), episode(0.5, True), ["x"]) == {"environment": 1.5}


WEIGHTS = st.floats(0, 1e9, allow_nan=False)
REPLIES = st.lists(st.one_of(st.text(), st.sampled_from(["<think>a</think>\\boxed{1}", "", "x" * 5000])), max_size=3)


@given(
    environment=st.floats(1e-3, 1e3),
    weights=st.tuples(WEIGHTS, WEIGHTS),
    scores=st.tuples(st.floats(-100, 100), st.floats(1e-3, 100)),
    right=REPLIES,
    wrong=REPLIES,
)
def test_a_right_answer_beats_a_wrong_one_whatever_the_bonuses_and_the_texts(
    environment, weights, scores, right, wrong
):
    lower, above = scores
    chosen = options(
        environment=environment,
        format={"weight": weights[0], "markers": ["<think>", "\\boxed{}"]},
        length={"weight": weights[1]},
    )
    first = sum(parts_of(chosen, episode(lower + above, True), right).values())
    second = sum(parts_of(chosen, episode(lower, False), wrong).values())
    assert first > second


def test_without_right_first_a_bonus_may_win_and_a_warning_says_so(caplog):
    chosen = options(right_first=False, environment=0.1, format={"weight": 1.0, "markers": ["!"]})
    assert sum(parts_of(chosen, episode(0.0, False), ["!"]).values()) > sum(
        parts_of(chosen, episode(1.0, True), ["4"]).values()
    )
    with caplog.at_level(logging.WARNING):
        warn_of_wrong_replies_ahead(chosen)
    assert "a wrong answer may earn more than a right one" in caplog.text


def test_nothing_is_printed_where_right_comes_first(caplog):
    with caplog.at_level(logging.WARNING):
        warn_of_wrong_replies_ahead(options(**BOTH))
    assert not caplog.text


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"environment": 0.0}, "does not rank a right answer first"),
        ({"environment": float("inf")}, "finite"),
        ({"format": {"markers": []}}, "at least 1 item"),
        ({"format": {"markers": ["/(/"]}}, "is not a regular expression"),
        ({"format": {"weight": -1, "markers": ["x"]}}, "greater than or equal to 0"),
        ({"length": {"free": 10, "limit": 10}}, "does not hold"),
        ({"length": {"longest": 3}}, "Extra inputs"),
    ],
)
def test_options_that_make_no_sense_are_refused(given, says):
    with pytest.raises(ValidationError, match=says):
        options(**given)


def test_a_reply_earns_its_turn_reward_times_the_weight_of_the_environment():
    mask = np.array([False, True, False, True])
    rollout = Rollout(tokens([1, 2, 3, 4]), mask, mask, None, np.zeros(4, np.int32), 1.0)
    assert turns_of(options(environment=2.0), Episode((rollout,), 1.0)) == []
    turned = Episode((replace(rollout, turns=turn_rewards([2, 4], [0.25, 0.5])),), 1.0)
    assert turns_of(options(environment=2.0), turned) == [0.5, 1.0]

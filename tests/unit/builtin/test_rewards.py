"""The built-in rewards: exact values, reply by reply."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from atropos_core.builtin.config import ExactOptions, FormatOptions, LengthOptions, NumericOptions
from atropos_core.builtin.numbers import last_number
from atropos_core.builtin.rewards import (
    EnvironmentReward,
    ExactReward,
    FormatReward,
    LengthReward,
    NumericReward,
    last_reply,
)
from atropos_core.errors import DataError
from atropos_core.interfaces import Reward
from atropos_core.rollouts.replies import message_of
from atropos_core.types import Task
from tests.unit.parts import episode, rollout


def task(answer: str | None) -> Task:
    return Task("t", (), answer)


async def of(reward: Reward, answer: str | None, *replies: str) -> list[float]:
    made = await reward(task(answer), [episode(0.0, reply) for reply in replies])
    assert made.dtype == np.float32
    assert made.shape == (len(replies),)
    return made.tolist()


async def test_the_environments_own_score_is_the_reward():
    made = await EnvironmentReward()(task(None), [episode(0.25), episode(-3.0)])
    assert made.tolist() == [0.25, -3.0]
    assert made.dtype == np.float32


# -- exact


async def test_exact_counts_to_the_letter_but_for_white_space_around_it():
    reward = ExactReward(ExactOptions())
    assert await of(reward, " Paris\n", "Paris", " Paris ", "paris", "Paris.", "") == [1, 1, 0, 0, 0]


async def test_exact_can_mind_white_space_and_ignore_case():
    assert await of(ExactReward(ExactOptions(strip=False)), "a", "a", "a ", "A") == [1, 0, 0]
    assert await of(ExactReward(ExactOptions(ignore_case=True)), "Straße", "STRASSE", "strase") == [1, 0]


@pytest.mark.parametrize("reward", [ExactReward(ExactOptions()), NumericReward(NumericOptions())])
async def test_a_task_without_an_answer_is_named(reward):
    with pytest.raises(DataError, match="task 't' has no answer"):
        await of(reward, None, "x")


# -- numeric


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("it is 42", 42.0), ("42.", 42.0), ("1,234,567", 1234567.0), ("$1,200.50", 1200.5), ("-$5", -5.0),
        ("first 3, then 4", 4.0), ("-0.5", -0.5), (".25", 0.25), ("x = -7.", -7.0), ("3 apples, 4 pears.", 4.0),
        ("no number", None), ("", None), ("#### 18", 18.0), ("\\boxed{-3}", -3.0), ("12,", 12.0), ("$.5", 0.5),
    ],
)  # fmt: skip
def test_the_last_number_of_a_text(text, number):
    assert last_number(text) == number


@given(st.floats(-1e12, 1e12).map(lambda value: round(value, 3)))
def test_a_number_written_the_american_way_is_read_back(value):
    assert last_number(f"So the answer is {value:,.3f}.") == pytest.approx(value, abs=1e-9)


@given(st.text(max_size=40))
def test_no_text_breaks_the_search_for_a_number(text):
    found = last_number(text)
    assert found is None or not math.isnan(found)


async def test_numeric_compares_the_last_numbers():
    reward = NumericReward(NumericOptions())
    assert await of(reward, "#### 1,000", "so 1000", "1000.0", "1000 or 999", "none", "-1000") == [1, 1, 0, 0, 0]


async def test_numeric_tolerance_is_relative_above_one_and_absolute_below():
    reward = NumericReward(NumericOptions(tolerance=0.01))
    assert await of(reward, "1000", "1009", "1011", "991", "989") == [1, 0, 1, 0]
    assert await of(reward, "0.1", "0.1099", "0.1101") == [1, 0]
    exact = NumericReward(NumericOptions(tolerance=0))
    assert await of(exact, "0.1", "0.10", "0.1000001") == [1, 0]


async def test_an_answer_without_a_number_is_named():
    with pytest.raises(DataError, match="the answer of task 't' has no number in it: 'blue'"):
        await of(NumericReward(NumericOptions()), "blue", "3")


# -- format


async def test_format_is_the_share_of_patterns_found():
    reward = FormatReward(FormatOptions(patterns=(r"<a>.*</a>", r"\d+$", "x")))
    assert await of(reward, None, "<a>\n</a> x 5", "5", "", "x") == [
        1.0, np.float32(1 / 3), 0.0, np.float32(1 / 3),
    ]  # fmt: skip


async def test_format_wants_a_final_answer_by_default():
    reward = FormatReward(FormatOptions())
    assert await of(reward, None, "#### 5", "\\boxed{5}", "5", "####", "\\boxed{}") == [1, 1, 0, 0, 0]


FORMAT = FormatReward(FormatOptions(patterns=("<think>.+</think>", "^<think>", "<tool_call>")))


@pytest.mark.parametrize(
    ("text", "opening", "wanted"),
    [
        ("<think>2 and 2</think>4", "", 2 / 3),
        ("2 and 2</think>4", "<think>", 2 / 3),
        ("2 and 2</think>4", "", 0.0),
        ("2 and 2, that might be", "<think>", 1 / 3),
        ('<think>so</think><tool_call>{"name": "add", "arguments": {}}</tool_call>', "", 1.0),
        ("4", "", 0.0),
    ],
)
async def test_format_is_looked_for_in_the_whole_reply(text, opening, wanted):
    made = await FORMAT(task(None), [replace(episode(0.0), messages=(message_of(text, opening),))])
    assert made.tolist() == [np.float32(wanted)]


async def test_format_does_not_look_at_thoughts_for_a_final_answer():
    texts = ("<think>\\boxed{5}", "<think>no</think>\\boxed{5}", "<think>#### 5</think>So", "\\boxed{5} <think>or")
    episodes = [replace(episode(0.0), messages=(message_of(text),)) for text in texts]
    assert (await FormatReward(FormatOptions())(task(None), episodes)).tolist() == [0, 1, 0, 1]


@pytest.mark.parametrize("opening", ["", "<think>"])
async def test_a_reply_that_is_cut_off_as_it_thinks_is_not_scored_by_its_thoughts(opening):
    text = "2 and 2, that might be 4" if opening else "<think>2 and 2, that might be 4"
    cut_off = replace(episode(0.0), messages=(message_of(text, opening),), finish="length")
    patterns = FormatReward(FormatOptions(patterns=("[0-9]", "</think>")))
    for reward in (NumericReward(NumericOptions()), ExactReward(ExactOptions()), patterns):
        assert (await reward(task("4"), [cut_off])).tolist() == [0.0]


# -- length


@pytest.mark.parametrize(("sampled", "wanted"), [(1, 0), (4, 0), (5, -0.25), (6, -0.5), (8, -1), (50, -1)])
async def test_length_falls_from_nothing_to_minus_one_between_its_bounds(sampled, wanted):
    reward = LengthReward(LengthOptions(free_tokens=4, limit_tokens=8))
    made = await reward(task(None), [episode(0.0, "", rollout(30, sampled))])
    assert made.tolist() == [wanted], "given tokens do not count"
    assert made.dtype == np.float32


async def test_length_counts_all_rollouts_of_an_episode():
    reward = LengthReward(LengthOptions(free_tokens=4, limit_tokens=8))
    made = await reward(task(None), [episode(0.0, "", rollout(2, 3), rollout(2, 3))])
    assert made.tolist() == [-0.5]


# -- the last reply


def test_the_last_reply_is_the_assistants_last_text():
    spoken = replace(
        episode(),
        messages=(
            {"role": "assistant", "content": "first"},
            {"role": "assistant", "content": "second"},
            {"role": "tool", "content": "third"},
        ),
    )
    assert last_reply(spoken) == "second"
    assert last_reply(replace(spoken, messages=())) == ""
    assert last_reply(replace(spoken, messages=({"role": "assistant", "content": None},))) == ""

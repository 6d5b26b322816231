"""What is known without reasoning-gym: the options, how an answer is read, and that reasoning-gym is missing."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
from pydantic import ValidationError

from atropos_core.errors import FitError
from atropos_core.plugins.manager import load_plugins
from atropos_core.plugins.requirements import check_requires
from atropos_env_reasoning_gym.config import ReasoningGymOptions
from atropos_env_reasoning_gym.environment import answer_of, parts_of


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({}, "give dataset, or a mixture"),
        ({"dataset": "gcd", "mixture": {"lcm": 1}}, "give dataset, or a mixture"),
        ({"mixture": {"gcd": 0}}, "greater than 0"),
        ({"dataset": "gcd", "parameters": {"lcm": {}}}, "parameters.lcm has no effect"),
        ({"dataset": "gcd", "parameters": {"gcd": {"seed": 1}}}, "parameters.gcd.seed is set by the run"),
        ({"dataset": "gcd", "levels": [-1]}, "greater than or equal to 0"),
    ],
)
def test_options_that_cannot_be_are_refused(options, says):
    with pytest.raises(ValidationError, match=says):
        ReasoningGymOptions(**options)


def test_what_follows_the_colon_is_the_data_set():
    provider = load_plugins().registry.find("environment", "reasoning_gym:chain_sum").provider
    assert provider.options().dataset == "chain_sum"


@pytest.mark.skipif(find_spec("reasoning_gym") is not None, reason="reasoning-gym is installed here")
def test_a_package_that_is_missing_is_named_before_anything_is_built():
    with pytest.raises(FitError, match="'reasoning_gym', which is not installed.*\n.*pip install reasoning_gym"):
        check_requires(load_plugins().registry.find("environment", "reasoning_gym"))


@pytest.mark.parametrize(
    ("text", "form", "answer"),
    [
        ("<answer>1</answer> no, <answer> 2 </answer>", "tag", "2"),
        ("the answer is 2", "tag", None),
        ("</answer><answer>", "tag", None),
        ("<answer></answer>", "tag", ""),
        ("2 + 2\n#### 4\nright?", "marked", "4"),
        ("4", "marked", None),
        ("####", "marked", None),
        (" 4\n", "whole", "4"),
        (" ", "whole", None),
    ],
)
def test_what_a_reply_answers(text, form, answer):
    assert answer_of(text, form) == answer


def test_tasks_are_parted_by_weight_and_each_part_has_one():
    assert parts_of(80, [3.0, 1.0]) == [60, 20]
    assert sum(parts_of(100, [1.0, 1.0, 1.0])) == 100
    assert parts_of(2, [1000.0, 1.0]) == [2, 1]

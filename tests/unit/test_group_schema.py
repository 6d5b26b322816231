"""What a group may hold, however it arrives."""

from __future__ import annotations

import math
import re
from typing import Any

import numpy as np
import pytest

from atropos_core.errors import DataError
from atropos_core.group_schema import check_episode, check_group, check_sampling, check_tasks
from atropos_core.types import Sampling, Task
from tests.wrong_groups import HUGE, NATIVE, RIGHT, VALUES, VOCABULARY, group


@pytest.mark.parametrize("wrong", [*VALUES, *NATIVE])
def test_what_must_not_be_trained_is_refused_by_name_and_value(wrong: str) -> None:
    change, named = (VALUES | NATIVE)[wrong]
    with pytest.raises(DataError) as refused:
        check_group(change(group()), VOCABULARY)
    assert re.search(named, str(refused.value)), refused.value
    assert len(str(refused.value)) < 500


@pytest.mark.parametrize("right", RIGHT)
def test_what_can_be_trained_is_taken(right: str) -> None:
    check_group(RIGHT[right](group()), VOCABULARY)


def test_an_evaluation_may_be_greedy_and_training_may_not() -> None:
    greedy = VALUES["greedy tokens that are trained"][0](group())
    check_episode(greedy.episodes[0], VOCABULARY)
    with pytest.raises(DataError, match="the likeliest token was taken each time"):
        check_group(greedy, VOCABULARY)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"temperature": 1e308}, "temperature"), ({"temperature": HUGE}, "temperature"), ({"temperature": True}, "temperature"),
        ({"temperature": math.nan}, "temperature is nan"), ({"temperature": [1]}, "temperature is a list"),
        ({"temperature": np.ones(3)}, "temperature is a ndarray"), ({"top_p": 0}, "top_p is 0"), ({"top_p": "1"}, "top_p"),
        ({"top_k": -1}, "top_k"), ({"top_k": HUGE}, "top_k"), ({"max_tokens": 0}, "max_tokens"), ({"max_tokens": 1.0}, "max_tokens"),
        ({"stop_ids": [1]}, "stop_ids is a list"), ({"stop_ids": (-1,)}, "stop_ids"), ({"stop_ids": (HUGE,)}, "stop_ids"),
        ({"stop": ["a"]}, "stop is a list"), ({"stop": ("",)}, "not empty"), ({"stop": ("a",) * 17}, "at most 16"),
        ({"stop": ("a" * 501,)}, "more than 500"), ({"stop": "ab"}, "stop"),
        ({"stop_ids": (True,)}, "stop_ids"), ({"stop_ids": (1,) * 4097}, "at most 4,096"),
    ],
    ids=str,
)  # fmt: skip
def test_a_sampling_that_cannot_be_is_refused(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(DataError, match=named):
        check_sampling(Sampling(**changes))
    check_sampling(Sampling(temperature=0, stop_ids=(3, 5), stop=("\nQ:", "x")))


def test_two_tasks_of_one_id_are_named_with_their_numbers() -> None:
    tasks = [Task(str(number % 30), ()) for number in range(40)]
    with pytest.raises(DataError, match="environment 'sums': tasks 0 and 30 of one split both have the id '0'"):
        check_tasks("sums", tasks)
    check_tasks("sums", tasks[:30])
    with pytest.raises(DataError, match="task 1: task.id is 3: must be text"):
        check_tasks("sums", [Task("0", ()), Task(3, ())])  # type: ignore[arg-type]

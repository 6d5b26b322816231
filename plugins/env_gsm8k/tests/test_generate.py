"""The generated problems: right, apart by split, and the same everywhere."""

from __future__ import annotations

import json
import re
from hashlib import sha256

import pytest

from atropos_env_gsm8k.generate import LARGEST, NAMES, STORIES, THINGS, problem

ANNOTATION = re.compile(r"(\d+)([-+*/])(\d+)=<<(\d+)([-+*/])(\d+)=(\d+)>>(\d+)\.")
MANY = 20_000


@pytest.fixture(scope="module")
def train() -> list[dict[str, str]]:
    return [problem("train", index) for index in range(MANY)]


@pytest.fixture(scope="module")
def test() -> list[dict[str, str]]:
    return [problem("test", index) for index in range(MANY)]


def without_names(record: dict[str, str]) -> str:
    """The story and its numbers, without names and things."""
    return re.sub(rf"\b({'|'.join([*NAMES, *THINGS])})\b", "_", record["question"])


def test_train_and_test_share_no_question(train: list[dict[str, str]], test: list[dict[str, str]]) -> None:
    assert not {r["question"] for r in train} & {r["question"] for r in test}


def test_a_renamed_test_problem_is_not_in_train(train: list[dict[str, str]], test: list[dict[str, str]]) -> None:
    assert not {without_names(r) for r in train} & {without_names(r) for r in test}


def test_questions_of_a_split_are_practically_unique(train: list[dict[str, str]], test: list[dict[str, str]]) -> None:
    assert len({r["question"] for r in train}) > 0.99 * MANY
    assert len({r["question"] for r in test}) > 0.98 * MANY


def test_every_annotation_is_true_and_the_last_one_is_the_answer(
    train: list[dict[str, str]], test: list[dict[str, str]]
) -> None:
    for record in train + test:
        *steps, last = record["answer"].split("\n")
        for step in steps:
            found = ANNOTATION.search(step)
            assert found, step
            left, operator, right, *again, value, result = found.groups()
            assert [left, operator, right] == again and value == result
            expected = {
                "+": int(left) + int(right),
                "-": int(left) - int(right),
                "*": int(left) * int(right),
                "/": int(left) / int(right),
            }[operator]
            assert int(value) == expected and 1 <= expected <= LARGEST
        assert last == f"#### {result}"


def test_a_problem_does_not_depend_on_the_ones_before_it(train: list[dict[str, str]]) -> None:
    assert problem("train", 12_345) == train[12_345]
    assert problem("train", 10**12) == problem("train", 10**12)


def test_another_seed_gives_other_problems_in_the_same_split() -> None:
    first, second = ([problem("test", index, seed)["question"] for index in range(200)] for seed in (0, 1))
    assert len(set(first) & set(second)) < 5


def test_every_story_is_in_both_splits(train: list[dict[str, str]], test: list[dict[str, str]]) -> None:
    for records in (train, test):
        assert len({re.sub(r"\d+", "_", without_names(record)) for record in records}) == len(STORIES)


def test_the_problems_are_the_same_on_every_platform_and_python(
    train: list[dict[str, str]], test: list[dict[str, str]]
) -> None:
    result = json.dumps([train[:1000], test[:1000]], sort_keys=True)
    assert sha256(result.encode()).hexdigest() == "a4c1c0cedcc834a3283677cf6422818ead7b7a165258a1c3113a1c9905c06a33"


def test_an_unknown_split_or_a_negative_index_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="'validation'"):
        problem("validation", 0)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="-1"):
        problem("train", -1)

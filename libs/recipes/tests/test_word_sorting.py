"""The environment of recipe laptop-smollm2-135m: no held-out word is trained, no kind is larger by much, and the recipe fits it."""

from __future__ import annotations

import asyncio
from collections import Counter

from atropos_core.cli.options import configure
from atropos_recipes.headers import path_of
from atropos_recipes.word_sorting import SHOWN, WORDS, WordSorting

environment = WordSorting()


def words(split):
    return [task.messages[-1]["content"] for task in environment.tasks(split)]


def test_no_word_is_of_two_kinds_or_in_both_splits():
    every = [*words("train"), *words("test"), *SHOWN.values()]
    assert len(every) == len(set(every)) == sum(len(some.split()) for some in WORDS.values()) + len(SHOWN)


def test_a_constant_reply_is_right_for_less_than_a_third_of_the_held_out_words():
    kinds = Counter(task.answer for task in environment.tasks("test"))
    assert list(SHOWN) == list(WORDS) and set(kinds) == set(SHOWN)
    assert max(kinds.values()) / kinds.total() < 1 / 3


def test_the_whole_reply_has_to_be_the_kind():
    [dog] = [task for task in environment.tasks("test") if task.id == "dog"]
    replies = {
        "animal": (1, 1),
        " animal\n": (1, 1),
        "food": (0, 1),
        "Animal": (0, 0),
        "animal.": (0, 0),
        "animal food": (0, 0),
        "": (0, 0),
    }
    for text, wanted in replies.items():
        score = asyncio.run(environment.score(dog, {"role": "assistant", "content": text}))
        assert (score.value, score.metrics["answered"]) == wanted and score.correct == bool(wanted[0]), text


def test_the_recipe_evaluates_on_every_held_out_word():
    config = configure(path_of("laptop-smollm2-135m"), model="tiny")[0].config
    assert config.evaluation.problems == len(environment.tasks("test"))
    assert config.evaluation.temperature == 0

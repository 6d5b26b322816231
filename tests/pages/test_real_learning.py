"""The work of benchmarks/real_learning.py: no held-out word is trained, no kind is larger by much, and the run file fits the rows."""

from __future__ import annotations

import json
from collections import Counter

from atropos_core.cli.options import configure
from atropos_core.rollouts.evaluation_statistics import wilson
from benchmarks.real_learning import RUN_FILE, SHOWN, WORDS, figures, rows


def words(split):
    return [row["prompt"][-1]["content"] for row in rows()[split]]


def test_no_word_is_of_two_kinds_or_in_both_splits():
    every = [*words("train"), *words("test"), *SHOWN.values()]
    assert len(every) == len(set(every)) == sum(len(some.split()) for some in WORDS.values()) + len(SHOWN)


def test_a_constant_reply_is_right_for_a_third_of_the_held_out_words_at_most():
    kinds = Counter(row["answer"] for row in rows()["test"])
    assert list(SHOWN) == list(WORDS) and set(kinds) == set(SHOWN)
    assert max(kinds.values()) / kinds.total() < 1 / 3


def test_the_run_evaluates_on_every_held_out_word():
    config = configure(RUN_FILE, model="tiny")[0].config
    assert config.evaluation.problems == len(rows()["test"])
    assert config.evaluation.temperature == 0


def test_figures_are_those_of_the_first_and_the_last_evaluation():
    steps = [
        {"eval/accuracy": 0.25, "eval/problems": 4.0, "eval/answered": 1.0, "eval/failed": 0.0, "time/step_s": 1.0},
        {"reward/mean": 0.5, "time/step_s": 2.0},
        {"reward/mean": 1.0, "time/step_s": 3.0, "eval/accuracy": 0.75, "eval/problems": 4.0, "eval/answered": 0.5, "eval/failed": 1.0},
    ]  # fmt: skip
    found = figures(json.loads(json.dumps(steps)))
    assert (found["before"]["accuracy"], found["after"]["accuracy"], found["after"]["answered"]) == (0.25, 0.75, 0.5)
    assert found["after"]["interval"] == [round(end, 3) for end in wilson(0.75, 4)]
    assert (found["steps"], found["rewards"]) == (2, [0.5, 1.0])

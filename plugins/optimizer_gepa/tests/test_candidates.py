"""Selection against what the paper's algorithm says, step by step."""

from __future__ import annotations

import random

import numpy as np
import pytest

from atropos_optimizer_gepa.candidates import Candidate, best, frequencies, table
from atropos_optimizer_gepa.proposers import first_words


def by_the_paper(scores):
    """Algorithm 2 of arXiv 2507.19457: the best of each task, without those whose every task another one leads as well."""
    fronts = [
        {c for c in range(len(scores)) if scores[c][t] == max(row[t] for row in scores)} for t in range(len(scores[0]))
    ]
    left = set().union(*fronts)
    for one in sorted(left, key=lambda c: (sum(c in front for front in fronts), c)):
        if all(front & (left - {one}) for front in fronts if one in front):
            left.discard(one)
    counts = [sum(c in front for front in fronts) if c in left else 0 for c in range(len(scores))]
    return [count / sum(counts) for count in counts]


@pytest.mark.parametrize("seed", range(40))
def test_parents_are_drawn_as_often_as_the_papers_algorithm_says(seed):
    rng = np.random.default_rng(seed)
    scores = rng.integers(0, 3, (rng.integers(1, 9), rng.integers(1, 7))) / 2
    assert frequencies(scores).tolist() == pytest.approx(by_the_paper(scores.tolist()))


def test_one_that_nobody_beats_on_a_single_task_stays_beside_one_with_a_better_mean():
    assert frequencies(np.array([[0.9, 0.9, 0.0], [0.0, 0.0, 0.5], [0.8, 0.8, 0.0]])).tolist() == pytest.approx(
        [2 / 3, 1 / 3, 0]
    )


def test_before_anything_was_tried_each_is_as_likely():
    assert frequencies(np.zeros((2, 0))).tolist() == [0.5, 0.5]
    assert best([Candidate("a"), Candidate("b")]) == 0


def test_a_prompt_that_was_not_tried_on_a_task_is_not_compared_on_it():
    tried = [Candidate("a", scores={"x": -1.0}), Candidate("b", scores={"x": -1.5, "y": -3.0})]
    assert table(tried).tolist() == [[-1.0, -np.inf], [-1.5, -3.0]]
    assert frequencies(table(tried)).tolist() == [0.5, 0.5]
    assert best(tried) == 0


def test_one_that_was_not_tried_yet_is_not_the_best_where_every_reward_is_below_zero():
    assert best([Candidate("a", scores={"x": -2.0}), Candidate("b", scores={"x": -1.0}), Candidate("c")]) == 1


async def test_first_words_are_those_of_tasks_that_went_well():
    examples = [("Rosa has 3 apples", "3", 1.0), ("Tom runs", "x", 0.0)]
    made = {await first_words("Eva", examples, random.Random(seed)) for seed in range(20)}
    assert made == {"Rosa", "Eva Rosa"}

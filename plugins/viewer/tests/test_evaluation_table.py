"""The table of an evaluation that the page gets."""

from __future__ import annotations

from atropos_records.rollout_records import EvaluatedProblem, EvaluatedSample
from atropos_viewer.evaluation_table import evaluation_table


def sample(correct: bool | None, finish: str = "stop") -> EvaluatedSample:
    return EvaluatedSample(
        correct=correct, reward=0.25, metrics={}, finish=finish, sampled_tokens=3, messages=(), failed="", failed_in=""
    )


def test_a_problem_whose_scores_do_not_say_what_is_right_has_no_number_of_right_answers():
    problems = [
        EvaluatedProblem("a", "poems", 0, 2, (sample(None), sample(None))),
        EvaluatedProblem("b", "sums", 0, 2, (sample(False), sample(None))),
        EvaluatedProblem("c", "sums", 1, 1, (sample(True),)),
    ]
    assert evaluation_table(problems)["correct"] == [None, 0, 1]


def test_samples_that_reached_max_tokens_are_counted():
    problems = [
        EvaluatedProblem("a", "sums", 0, 2, (sample(False, "length"), sample(True))),
        EvaluatedProblem("b", "sums", 1, 1, (sample(True),)),
    ]
    assert evaluation_table(problems)["cut"] == [1, 0]

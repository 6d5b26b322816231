"""The figures that benchmarks/real_learning.py takes from the metrics of a run."""

from __future__ import annotations

import json

from atropos_core.rollouts.evaluation_statistics import wilson
from benchmarks.real_learning import figures


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

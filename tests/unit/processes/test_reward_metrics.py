"""Metrics that rewards report of rollouts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from atropos_core.errors import DataError
from atropos_core.processes.reward_metrics import reported_metrics, with_metrics
from atropos_core.types import Episode, Score

EPISODE = Episode((), 1.0, metrics={"turns/used": 2.0})


def test_metrics_of_scores_become_plain_numbers_of_each_episode():
    given = [Score(1.0, metrics={"canary/leak": np.float32(0.5), "canary/long": True}), 0.0, Score(0.0)]
    assert reported_metrics(given) == [{"canary/leak": 0.5, "canary/long": 1.0}, {}, {}]
    assert reported_metrics([Score(1.0, turns=[1.0]), 0.0]) is None
    assert reported_metrics(np.zeros(2)) is None


def test_they_are_added_to_those_of_the_environment():
    assert with_metrics(EPISODE, {"canary/leak": 1.0}).metrics == {"turns/used": 2.0, "canary/leak": 1.0}
    assert with_metrics(EPISODE, {}) is EPISODE


@pytest.mark.parametrize(
    ("metrics", "says"),
    [
        ({"abstained": 1.0}, "has no slash"),
        ({3: 1.0}, "has no slash"),
        ({"canary/leak": float("nan")}, "not a finite number"),
        ({"canary/leak": "1"}, "not a finite number"),
        ({"health/leak": 1.0}, "a name of the run's own metrics"),
    ],
)
def test_a_metric_that_is_not_valid_is_one_error(metrics: Any, says: str):
    with pytest.raises(DataError, match=says):
        reported_metrics([Score(1.0, metrics=metrics)])


def test_two_that_report_the_same_metric_are_refused():
    with pytest.raises(DataError, match="'turns/used', which the environment or another reward reports too"):
        with_metrics(EPISODE, {"turns/used": 1.0})

"""Metrics that rewards report of rollouts, such as the use of a canary: checked alike for rewards here and in a child process."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from atropos_core.errors import DataError
from atropos_core.group_schema import LARGEST_METRIC, check_metric_name
from atropos_core.types import Episode, Score

ReportedMetrics = list[Mapping[str, float]]  # of each episode


def reported_metrics(given: Any) -> ReportedMetrics | None:
    """Return the metrics of each score that a reward gave; None if there are none. Raises DataError for one that is not valid."""
    if not isinstance(given, list | tuple) or not any(isinstance(one, Score) and one.metrics for one in given):
        return None
    return [_checked(one.metrics) if isinstance(one, Score) else {} for one in given]


def with_metrics(episode: Episode, metrics: Mapping[str, float]) -> Episode:
    """Return the episode with these metrics as well. Raises DataError if it has one of them already."""
    if not metrics:
        return episode
    if twice := sorted(metrics.keys() & episode.metrics.keys()):
        raise DataError(
            f"a reward reports the metric {twice[0]!r}, which the environment or another reward reports too.",
            remedy="Rename one of them.",
        )
    return replace(episode, metrics={**episode.metrics, **metrics})


def _checked(metrics: Any) -> Mapping[str, float]:
    found: dict[str, float] = {}
    for name, value in dict(metrics).items():
        if not isinstance(name, str) or "/" not in name:
            raise DataError(
                f"a reward reports the metric {name!r:.100}, whose name has no slash: such names are the environment's.",
                remedy='Put a word and a slash before it, as in Score(value, metrics={"canary/leak": 1.0}).',
            )
        check_metric_name(name)
        item = getattr(value, "item", None)
        plain = item() if item is not None and getattr(value, "ndim", 1) == 0 else value
        if not isinstance(plain, bool | int | float) or not abs(plain) <= LARGEST_METRIC:
            raise DataError(
                f"a reward reports {plain!r:.100} as {name!r}: not a finite number of at most {LARGEST_METRIC:g}"
            )
        found[name] = float(plain)
    return found

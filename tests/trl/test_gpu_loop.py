"""The check `loop` of benchmarks/gpu.py on a CPU: a tiny model in this project's loop and in TRL's."""

from __future__ import annotations

import os

import pytest

from atropos_core.guards.deadlines import within
from tests.gpu.loop import loop
from tests.gpu.pair import Setting
from tests.gpu.report import Report

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.skipif(
        "TRL_PYTHON" not in os.environ, reason="needs TRL in a separate environment: `make test-export`"
    ),
]


async def test_both_loops_are_measured_on_replies_of_the_same_length() -> None:
    report = Report(print)
    await within(loop(Setting("cpu", small=True), report), 280, "loop")
    report.settle()
    figures = report.figures
    ours, theirs = 'Atropos, engine "hf"', "TRL, generate"
    for what in ("trajectories/s", "tokens/s, sampling", "tokens/s, update", "tokens of a reply", "peak, GB"):
        assert figures[f"{ours}: {what}"] > 0
        assert figures[f"{theirs}: {what}"] > 0
    for who in (ours, theirs):
        assert 0 < figures[f"{who}: trainer idle"] < 1
        assert 0 < figures[f"{who}: engine idle"] < 1
    [ratio] = [value for name, value in figures.items() if "the goal is" in name]
    assert ratio == pytest.approx(figures[f"{ours}: trajectories/s"] / figures[f"{theirs}: trajectories/s"])

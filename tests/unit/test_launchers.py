"""What any launcher refuses of a run."""

from __future__ import annotations

from pathlib import Path

import pytest

from atropos_core.errors import FitError
from atropos_core.launchers import PlannedRun, refuse_idle_workers, refuse_missing_workers, refuse_other_gpus

API = '"http://127.0.0.1:0".'


def run(*, has_api: bool = False) -> PlannedRun:
    roles = {"trainer": ("cpu",), "engine-a": ("cuda:0", "cuda:1")}
    return PlannedRun(Path("/run"), "", roles, ["gsm8k"], has_api)


def test_workers_with_nothing_to_do_are_refused() -> None:
    refuse_idle_workers(run(), [], API)
    refuse_idle_workers(run(has_api=True), ["gsm8k"], API)
    with pytest.raises(FitError, match=r"so the run itself runs its environments[\s\S]*Add \[api\] with url = .*:0"):
        refuse_idle_workers(run(), ["gsm8k"], API)
    with pytest.raises(FitError, match=r"the run has no such environment[\s\S]*Choose one of: gsm8k"):
        refuse_idle_workers(run(has_api=True), ["gsm8k", "other"], API)


def test_a_run_with_an_api_needs_workers() -> None:
    refuse_missing_workers(run(), [])
    refuse_missing_workers(run(has_api=True), ["gsm8k"])
    with pytest.raises(FitError, match="no workers would run its environments"):
        refuse_missing_workers(run(has_api=True), [])


def test_a_role_uses_the_gpus_that_it_asks_for() -> None:
    refuse_other_gpus(run(), {"engine-a": 2})
    with pytest.raises(
        FitError, match=r"engine-a asks for 1 GPUs .* but uses cuda:0, cuda:1 \(engine\.replica\.a\.devices\)"
    ):
        refuse_other_gpus(run(), {"engine-a": 1})
    with pytest.raises(FitError, match=r"trainer asks for 2 GPUs[\s\S]*trainer.devices = \[\"cuda:0\", \"cuda:1\"\]"):
        refuse_other_gpus(run(), {"engine-a": 2, "trainer": 2})

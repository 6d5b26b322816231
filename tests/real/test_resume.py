"""A run of the real model that is killed and resumed ends with the weights of one that was not."""

from __future__ import annotations

import shutil
import signal
import time
from pathlib import Path

import pytest

from tests.conftest import metrics_of
from tests.e2e.runs import RunningRun, finish, weights
from tests.real.runs import Runs


@pytest.mark.timeout(900)
def test_a_run_killed_within_a_step_resumes_to_the_same_bits(runs: Runs, tmp_path: Path) -> None:
    whole = runs["ipc"]
    run = RunningRun(tmp_path / "run", "run", *runs.arguments("ipc"), "--dir", str(tmp_path / "run"))
    try:
        run.wait_for_step(0, 300)
        until = time.monotonic() + 120
        while not (run.folder / "checkpoints/step-000001").is_dir():
            assert run.process.poll() is None and time.monotonic() < until, run.text
            time.sleep(0.02)
        time.sleep(0.5)
        run.kill("supervisor")
        assert run.ended_within(60) == -signal.SIGKILL
    finally:
        run.process.kill()
    assert [line["step"] for line in metrics_of(run.folder)] == [1], "it was in its second step"
    resumed = finish(run.folder, "resume", str(run.folder))
    assert "resumes    after step 1" in resumed.text
    assert weights(run.folder, 2) == weights(whole, 2) != weights(whole, 1)
    shutil.rmtree(run.folder)

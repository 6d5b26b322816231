"""Processes of a real run that are stopped: named within seconds, and given up at the bound of the run file."""

from __future__ import annotations

import signal
import time

import psutil
import pytest

from tests.e2e.runs import QUICK, RunningRun

pytestmark = pytest.mark.slow


def says(run: RunningRun, text: str, deadline_s: float = 60) -> None:
    until = time.monotonic() + deadline_s
    while text not in run.text:
        assert time.monotonic() < until, f"never said {text!r}:\n{run.text}"
        time.sleep(0.05)


def test_a_stopped_engine_is_named_and_begun_again_and_a_stopped_trainer_ends_the_run(tmp_path, atropos):
    folder = tmp_path / "run"
    bounds = ("--set", "watch.say_s=2", "--set", "watch.least_s=5", "--set", "watch.times=2")
    run = RunningRun(folder, "run", "--dir", str(folder), *QUICK, *bounds, "--steps", "500", "--set", "restarts=1")
    try:
        run.wait_for_step(4)
        engine = run.children["engine"]
        engine.send_signal(signal.SIGSTOP)
        said = f"engine is stopped; to let it go on: kill -CONT {engine.pid}".replace(
            "engine is", f"engine (pid {engine.pid}) is"
        )
        says(run, said)
        assert f"engine (pid {engine.pid}) has given no answer to " in run.text
        says(run, "starting again from the last checkpoint")
        assert "ProcessSilent" not in run.text, "nobody has seen it as an error of the run"
        while engine.is_running() and engine.status() != psutil.STATUS_ZOMBIE:
            time.sleep(0.01)
        run.wait_for_step(6)
        while "trainer" not in run.children or run.children["engine"].pid == engine.pid:
            run.wait_for_step(6)
        trainer = run.children["trainer"]
        trainer.send_signal(signal.SIGSTOP)
        found = atropos("doctor", str(folder))
        assert found.code == 1
        assert f"trainer (pid {trainer.pid}) is stopped" in found.out and f"kill -CONT {trainer.pid}" in found.out
        assert run.ended_within(60) == 1
        assert f"ProcessSilent trainer (pid {trainer.pid}) gave no answer to " in run.text
    finally:
        run.process.kill()

"""kill -9 and Ctrl-C on a real run: clean ends, named errors, and a resume that ends with the same bits."""

from __future__ import annotations

import signal
import time

import psutil
import pytest

from tests.e2e.runs import QUICK, RunningRun, finish, weights
from tests.shared_memory import orphans

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    folder = tmp_path_factory.mktemp("whole") / "run"
    finish(folder, "run", "--dir", str(folder), *QUICK)
    return weights(folder, 9)


@pytest.mark.parametrize("role", ["engine", "trainer", "supervisor"])
def test_a_killed_process_ends_the_run_cleanly_and_resume_reaches_the_same_bits(role, tmp_path, uninterrupted):
    before = orphans()
    folder = tmp_path / "run"
    run = RunningRun(folder, "run", "--dir", str(folder), *QUICK)
    run.wait_for_step(5)
    run.kill(role)
    code = run.ended_within(10)
    assert orphans() <= before, "no segment stays"
    if role == "supervisor":
        assert code == -signal.SIGKILL
    else:
        assert code == 1
        assert f"ProcessDied {role} (pid {run.children[role].pid}) was killed by SIGKILL" in run.text
        assert "atropos resume" in run.text
    finish(folder, "resume", str(folder))
    assert weights(folder, 9) == uninterrupted
    assert not list(folder.glob("checkpoints/.*")), "no half-written checkpoint stays"


def test_ctrl_c_saves_and_says_how_to_go_on(tmp_path, uninterrupted):
    folder = tmp_path / "run"
    run = RunningRun(folder, "run", "--dir", str(folder), *QUICK)
    run.wait_for_step(4)
    run.process.send_signal(signal.SIGINT)
    assert run.ended_within(20) == 130
    assert f"atropos resume {folder}" in run.text
    finish(folder, "resume", str(folder))
    assert weights(folder, 9) == uninterrupted


@pytest.mark.parametrize(
    "role", [pytest.param("engine", marks=pytest.mark.long), "trainer"]
)  # an engine: the next test
def test_a_run_that_may_restart_goes_on_by_itself_to_the_same_bits(role, tmp_path, uninterrupted):
    folder = tmp_path / "run"
    run = RunningRun(folder, "run", "--dir", str(folder), *QUICK, "--set", "restarts=1")
    run.wait_for_step(5)
    run.kill(role)
    assert run.process.wait(120) == 0, run.text
    assert f"{role} (pid {run.children[role].pid}) was killed by SIGKILL" in run.text
    assert "starting again from the last checkpoint (0 more times at most)" in run.text
    assert weights(folder, 9) == uninterrupted


def test_a_run_out_of_restarts_ends_with_the_error(tmp_path):
    folder = tmp_path / "run"
    run = RunningRun(folder, "run", "--dir", str(folder), *QUICK, "--set", "restarts=1")
    run.wait_for_step(4)
    first = run.children["engine"]
    first.kill()
    while first.is_running() and first.status() != psutil.STATUS_ZOMBIE:
        time.sleep(0.01)
    run.wait_for_step(7)
    assert run.children["engine"] != first
    run.kill("engine")
    assert run.ended_within(15) == 1
    assert run.text.count("was killed by SIGKILL") == 2

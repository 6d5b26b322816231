"""kill -9 and Ctrl-C on a real run: clean ends, named errors, and a resume that ends with the same bits."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.e2e.runs import QUICK, RunningRun, finish, weights

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    folder = tmp_path_factory.mktemp("whole") / "run"
    finish(folder, "run", "--dir", str(folder), *QUICK)
    return weights(folder, 9)


def shared_memory() -> set[str]:
    return {path.name for path in Path("/dev/shm").iterdir()}


@pytest.mark.parametrize("role", ["engine", "trainer", "supervisor"])
def test_a_killed_process_ends_the_run_cleanly_and_resume_reaches_the_same_bits(role, tmp_path, uninterrupted):
    before = shared_memory()
    folder = tmp_path / "run"
    run = RunningRun(folder, "run", "--dir", str(folder), *QUICK)
    run.wait_for_step(5)
    run.kill(role)
    code = run.ended_within(10)
    assert shared_memory() <= before, "no segment stays"
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

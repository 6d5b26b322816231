"""kill -9 and Ctrl-C on a real run: clean ends, named errors, and a resume that ends with the same bits."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest

from tests.e2e.runs import RunningRun, finish, weights
from tests.shared_memory import SharedFiles
from tests.waiting import has_ended, wait_until

pytestmark = pytest.mark.slow

STEPS = 14
WATCHED = (
    "--env", "gsm8k", "--deterministic", "--steps", str(STEPS),
    "--set", "training.groups_per_step=4", "--set", "training.group_size=4",
    "--set", "checkpoint.every=2", "--set", "evaluation.problems=8",
)  # fmt: skip


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    folder = tmp_path_factory.mktemp("whole") / "run"
    finish(folder, "run", "--dir", str(folder), *WATCHED)
    return weights(folder, STEPS)


def going_on(folder: Path, step: int) -> RunningRun:
    """The run in `folder`, resumed, with all its processes and at `step`."""
    run = RunningRun(folder, "resume", str(folder))
    until = time.monotonic() + 120
    while not {"engine", "trainer"} <= run.children.keys():
        assert time.monotonic() < until, run.text
        run.wait_for_step(step)
    return run


def test_whatever_ends_a_run_it_ends_cleanly_and_resumes_to_the_same_bits(tmp_path, uninterrupted):
    """Ended four times, each time after a further checkpoint and in a run that was resumed from what the last time left."""
    folder = tmp_path / "run"
    run = RunningRun(folder, "run", "--dir", str(folder), *WATCHED)
    run.wait_for_step(3)
    for role, next_step in (("engine", 5), ("trainer", 7)):
        ended = killed(run, role)
        assert run.process.returncode == 1
        assert f"ProcessDied {role} (pid {run.children[role].pid}) was killed by SIGKILL" in ended
        assert "atropos resume" in ended
        run = going_on(folder, next_step)
    killed(run, "supervisor")
    assert run.process.returncode == -signal.SIGKILL
    run = going_on(folder, 9)
    message = len(run.text)
    run.process.send_signal(signal.SIGINT)
    assert run.ended_within(60) == 130
    assert f"atropos resume {folder}" in run.text[message:]
    finish(folder, "resume", str(folder))
    assert weights(folder, STEPS) == uninterrupted
    assert not list(folder.glob("checkpoints/.*")), "no half-written checkpoint stays"


def killed(run: RunningRun, role: str) -> str:
    """What the run says of it; nothing of it stays."""
    message, files = len(run.text), SharedFiles()
    files.look()
    run.kill(role)
    run.ended_within(60)
    assert not files.left(), "no segment stays"
    return run.text[message:]


@pytest.mark.parametrize(
    "role", [pytest.param("engine", marks=pytest.mark.long), "trainer"]
)  # an engine: the next test
def test_a_run_that_may_restart_goes_on_by_itself_to_the_same_bits(role, tmp_path, uninterrupted):
    folder = tmp_path / "run"
    run = RunningRun(folder, "run", "--dir", str(folder), *WATCHED, "--set", "restarts=1")
    run.wait_for_step(5)
    run.kill(role)
    assert run.process.wait(120) == 0, run.text
    assert f"{role} (pid {run.children[role].pid}) was killed by SIGKILL" in run.text
    assert "starting again from the last checkpoint (0 more times at most)" in run.text
    assert weights(folder, STEPS) == uninterrupted


def test_a_run_out_of_restarts_ends_with_the_error(tmp_path):
    folder = tmp_path / "run"
    run = RunningRun(folder, "run", "--dir", str(folder), *WATCHED, "--set", "restarts=1")
    run.wait_for_step(4)
    first = run.children["engine"]
    first.kill()
    wait_until(lambda: has_ended(first.pid), "the end of the engine")
    run.wait_for_step(7)
    assert run.children["engine"] != first
    run.kill("engine")
    assert run.ended_within(60) == 1
    assert run.text.count("was killed by SIGKILL") == 2

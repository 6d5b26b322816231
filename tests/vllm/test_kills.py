"""`kill -9` of a process of a run with vLLM: a named error, nothing left, and a resume that goes on. `make soak` has more
moments, the supervisor, and runs that start again by themselves."""

from __future__ import annotations

import signal
import time

import pytest

from tests.conftest import metrics_of
from tests.e2e.runs import RunningRun
from tests.vllm.processes import left, segments, still_running, vllm_processes

pytestmark = pytest.mark.timeout(400)

VLLM = ("--engine", "vllm", "--env", "gsm8k")
SMALL = (
    *VLLM, "--set", "training.groups_per_step=4", "--set", "training.group_size=4", "--set", "evaluation.problems=8",
    "--set", "checkpoint.every=2", "--set", "engine.enforce_eager=true",
)  # fmt: skip


@pytest.mark.parametrize("role", ["worker", "core", "server", "trainer"])
def test_a_killed_process_ends_the_run_with_a_name_and_resume_goes_on(role, tmp_path):
    folder = tmp_path / "run"
    run = RunningRun(folder, "run", "--dir", str(folder), "--bridge", "ipc", *SMALL, "--steps", "60")
    run.wait_for_step(3, 200)
    processes = vllm_processes(run.supervisor)
    everyone = run.supervisor.children(recursive=True)
    segments_before = segments(everyone)
    assert any(name.startswith("psm_") for name in segments_before), "vLLM's own"
    killed = time.monotonic()
    victim = run.children["trainer"] if role == "trainer" else processes[role]
    victim.send_signal(signal.SIGKILL)
    code = run.process.wait(60)
    assert not still_running(everyone, killed + 60 - time.monotonic())
    assert code == 1
    assert "ProcessDied" in run.text
    assert "atropos resume" in run.text
    assert not left(segments_before), "no segment stays"
    assert not list(folder.glob("ipc/*")), "no handle file stays"
    if role == "worker":  # one whole resume; the others' checkpoints are made alike
        resumed = RunningRun(folder, "resume", str(folder), "--steps", "8")
        assert resumed.process.wait(200) == 0, resumed.text
        assert metrics_of(folder)[-1]["step"] == 8

"""`atropos run --engine vllm` as a user types it: every bridge learns, a kill has a name and an end, a resume goes on."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.conftest import metrics_of, plant
from tests.e2e.runs import RunningRun
from tests.e2e.test_tiny_run import PLANTED
from tests.vllm.processes import ROLES, left, segments, vllm_processes

pytestmark = pytest.mark.timeout(400)

STEPS = 24
VLLM = ("--engine", "vllm", "--env", "gsm8k")
SMALL = (
    *VLLM, "--set", "training.groups_per_step=4", "--set", "training.group_size=4", "--set", "evaluation.problems=8",
    "--set", "checkpoint.every=2", "--set", "engine.enforce_eager=true",
)  # fmt: skip


def shared_memory() -> set[str]:
    return {path.name for path in Path("/dev/shm").iterdir()}


@pytest.mark.parametrize("bridge", ["ipc", "lora", "checkpoint"])
def test_the_tiny_policy_learns_over_each_bridge_and_leaves_nothing(bridge, atropos, tmp_path):
    before = shared_memory()
    ended = atropos(
        "run", *VLLM, "--bridge", bridge, "--steps", str(STEPS), "--dir", "run", "--set", "evaluation.problems=256",
        timeout=350,
    )  # fmt: skip
    assert ended.code == 0, ended.out + ended.err
    lines = metrics_of(tmp_path / "run")
    assert 100 * (lines[-1]["eval/accuracy"] - lines[0]["eval/accuracy"]) >= 15, ended.out
    assert max(line["alignment/max_abs_logprob_diff"] for line in lines) <= 1e-4
    if bridge == "ipc":
        assert {line["bridge/bytes_copied"] for line in lines} == {0.0}
    assert shared_memory() <= before
    held = {path.name for path in (tmp_path / "run").iterdir()}
    assert held == {"checkpoints", "logs", "rollouts", "config.toml", "lock", "metrics.jsonl", "summary.json"}
    if bridge == "lora":  # its checkpoint is an adapter: vLLM serves it over its base
        again = atropos("eval", "run", "--engine", "vllm", timeout=200)
        assert again.code == 0, again.err
        assert f"{lines[-1]['eval/accuracy']:.4g}" in again.out
    assert not [p for p in psutil.process_iter(["environ"]) if (p.info["environ"] or {}).get("PWD") == str(tmp_path)]


@pytest.mark.parametrize("role", [*ROLES, "trainer"])
def test_a_killed_process_ends_the_run_with_a_name_and_resume_goes_on(role, tmp_path):
    folder = tmp_path / "run"
    run = RunningRun(folder, "run", "--dir", str(folder), "--bridge", "ipc", *SMALL, "--steps", "60")
    run.wait_for_step(3, 200)
    processes = vllm_processes(run.supervisor)
    everyone = run.supervisor.children(recursive=True)
    held = segments(everyone)
    assert any(name.startswith("psm_") for name in held), "vLLM's own"
    killed = time.monotonic()
    victim = run.children["trainer"] if role == "trainer" else processes[role]
    victim.send_signal(signal.SIGKILL)
    code = run.process.wait(10)
    _, alive = psutil.wait_procs(everyone, max(0.1, killed + 12 - time.monotonic()))
    assert not alive, f"still running: {alive}"
    assert code == 1
    assert "ProcessDied" in run.text
    assert "atropos resume" in run.text
    assert not left(held), "no segment stays"
    assert not list(folder.glob("ipc/*")), "no handle file stays"
    if role == "worker":  # one whole resume; the others' checkpoints are made alike
        resumed = RunningRun(folder, "resume", str(folder), "--steps", "8")
        assert resumed.process.wait(200) == 0, resumed.text
        assert metrics_of(folder)[-1]["step"] == 8


def test_the_supervisor_takes_everything_along(tmp_path):
    folder = tmp_path / "run"
    run = RunningRun(folder, "run", "--dir", str(folder), "--bridge", "ipc", *SMALL, "--steps", "60")
    run.wait_for_step(2, 200)
    everyone = run.supervisor.children(recursive=True)
    assert len(everyone) >= 5, "engine, trainer, server, engine core, worker"
    held = segments(everyone)
    run.supervisor.kill()
    _, alive = psutil.wait_procs([run.supervisor, *everyone], 10)
    assert not alive, f"still running: {alive}"
    assert not left(held)


def test_a_run_over_two_engines_shares_with_one_and_copies_to_the_other(atropos, tmp_path):
    ended = atropos(
        "run",
        *SMALL,
        "--bridge",
        "ipc",
        "--steps",
        "4",
        "--dir",
        "run",
        "--set",
        "engine.replica.second={}",
        timeout=300,
    )
    assert ended.code == 0, ended.out + ended.err
    lines = metrics_of(tmp_path / "run")
    assert lines[-1]["step"] == 4
    assert all(line["bridge/bytes_copied"] > 3e6 for line in lines[1:])
    assert max(line["alignment/max_abs_logprob_diff"] for line in lines) <= 1e-4, "tokens of both"
    for name in ("engine", "engine-second"):
        assert list((tmp_path / "run/logs").glob(f"*{name}*")), "each has a log of its own"


def test_strangers_called_vllm_are_never_touched(tmp_path):
    decoy = tmp_path / "vllm"
    shutil.copy(shutil.which("sleep") or "sleep", decoy)
    listen = "import socket, time; s = socket.socket(); s.bind(('127.0.0.1', 0)); s.listen(); time.sleep(600)"
    strangers = [
        subprocess.Popen([str(decoy), "600"]),
        subprocess.Popen([sys.executable, "-c", listen, "VLLM::EngineCore", "vllm.entrypoints.openai.api_server"]),
    ]
    try:
        folder = tmp_path / "run"
        run = RunningRun(folder, "run", "--dir", str(folder), "--bridge", "ipc", *SMALL, "--steps", "60")
        run.wait_for_step(1, 200)
        vllm_processes(run.supervisor)["server"].kill()
        assert run.process.wait(15) == 1
        time.sleep(1)
        assert [stranger.poll() for stranger in strangers] == [None, None]
    finally:
        for stranger in strangers:
            stranger.kill()
            stranger.wait()


def test_a_run_whose_publish_is_skipped_stops_with_the_named_error(atropos, tmp_path):
    plant(tmp_path, "forgetful", PLANTED)
    ended = atropos(
        "run", "--bridge", "forgetful", *SMALL, "--steps", "20", "--dir", "run", PYTHONPATH=str(tmp_path), timeout=200
    )
    assert ended.code == 1
    assert "Misaligned" in ended.err
    assert metrics_of(tmp_path / "run")[-1]["step"] == 2, "found at the first step after the first update"

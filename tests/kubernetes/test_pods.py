"""The commands of the manifests, on machines with addresses of their own: whole runs of the tiny policy, with kills of each pod."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.e2e.runs import QUICK, finish, weights
from tests.machines.network import Network, why_not
from tests.machines.pods import Pods

pytestmark = [
    pytest.mark.skipif(bool(why_not()), reason=f"namespaces cannot be made here: {why_not()}"),
    pytest.mark.timeout(600),
]
WITHIN_S = 240.0


@pytest.fixture
def network():
    made = Network([])
    yield made
    made.close()


@pytest.fixture
def run(network, tmp_path):
    """A function that renders a run and starts its pods. `run.directory` is where the run is."""
    made: list[Pods] = []

    def begin(*more: str, pods: tuple[str, ...] = ("loop", "engine", "trainer")) -> Pods:
        written = tmp_path / "big"
        done = subprocess.run(
            [
                sys.executable, "-m", "atropos_core", "run", "--launcher", "kubernetes", "--bridge", "checkpoint", *QUICK, "--set",
                "launcher.image='an-image'", "--set", "launcher.claim='a-claim'", "--set", f"launcher.mount='{tmp_path}/claim'", "--set",
                f"launcher.python='{sys.executable}'", "--dir", str(written), *more,
            ],
            capture_output=True, text=True, check=False, env={**os.environ, "HF_HUB_OFFLINE": "1", "COLUMNS": "400"},
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert f"kubectl apply -f {written}/manifests" in done.stdout
        (tmp_path / "claim").mkdir()
        made.append(Pods(written / "manifests", network, tmp_path))
        for pod in pods:
            made[-1].start(pod)
        return made[-1]

    begin.directory = tmp_path / "claim/runs/big"
    yield begin
    for one in made:
        one.close()


def wait_for_step(directory: Path, step: int, pods: Pods) -> None:
    until = time.monotonic() + WITHIN_S
    while not (
        (directory / "metrics.jsonl").exists() and (directory / "metrics.jsonl").read_bytes().count(b"\n") > step
    ):
        assert pods.started["loop"].poll() is None and time.monotonic() < until, pods.text()
        time.sleep(0.05)


def steps(directory: Path) -> list[int]:
    return [json.loads(line)["step"] for line in (directory / "metrics.jsonl").read_text().splitlines()]


def test_the_same_run_here_and_in_pods_gives_the_same_weights_and_every_pod_ends(run, tmp_path):
    pods = run(pods=("engine", "trainer", "loop"))  # in no order in particular
    here = finish(tmp_path / "here", "run", "--bridge", "checkpoint", *QUICK, "--dir", str(tmp_path / "here"))
    assert pods.wait("loop", WITHIN_S) == 0, pods.text()
    assert weights(run.directory, 9) == weights(here.folder, 9)
    for role in ("engine", "trainer"):
        assert pods.wait(role, 30) == 0, pods.text(role)
        assert "the run is over: 0" in pods.text(role)
        assert (run.directory / f"logs/{role}.log").exists()


@pytest.mark.parametrize("role", [pytest.param("engine", marks=pytest.mark.long), "trainer"])
def test_a_pod_that_is_lost_ends_the_attempt_by_name_and_the_next_pod_takes_its_part(role, run):
    pods = run("--set", "restarts=1")
    wait_for_step(run.directory, 4, pods)
    pods.machines[role].lose()
    pods.started[role].wait(10)
    pods.start(role)  # as its Job does
    assert pods.wait("loop", WITHIN_S) == 0, pods.text()
    assert re.search(rf"{role} \(pid \d+ in pod {role}-\d+\) (was lost|closed its connection)", pods.text()), (
        pods.text()
    )
    assert steps(run.directory) == list(range(10)), "none twice, none left out"


@pytest.mark.long
def test_a_process_that_is_killed_in_its_pod_is_named_and_the_pod_serves_the_next_attempt(run):
    pods = run("--set", "restarts=1")
    wait_for_step(run.directory, 4, pods)
    pods.processes("trainer")["trainer"].kill()
    assert pods.wait("loop", WITHIN_S) == 0, pods.text()
    assert re.search(r"trainer \(pid \d+ in pod trainer-\d+\) was killed by SIGKILL", pods.text()), pods.text()
    assert steps(run.directory) == list(range(10))
    assert pods.wait("trainer", 30) == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGKILL, marks=pytest.mark.long)])
def test_the_pod_of_the_run_that_is_evicted_or_killed_goes_on_in_another(number, run):
    pods = run()
    wait_for_step(run.directory, 4, pods)
    if number == signal.SIGKILL:  # of a container's first process, with which all of it ends
        pods.machines["loop"].lose()
        pods.started["loop"].wait(10)
    else:
        pods.signal("loop", number)
        assert pods.wait("loop", 60) == 130
    assert not {130, 128 + signal.SIGKILL} & failing_codes(pods), "the Job makes another pod"
    assert not (run.directory / "ended").exists()
    pods.start("loop")
    assert pods.wait("loop", WITHIN_S) == 0, pods.text()
    assert steps(run.directory) == list(range(10))
    assert [pods.wait(role, 30) for role in ("engine", "trainer")] == [0, 0]


def failing_codes(pods: Pods) -> set[int]:
    """Exit codes at which the Job of the run fails."""
    [rule] = [
        one["onExitCodes"] for one in pods.jobs["loop"]["spec"]["podFailurePolicy"]["rules"] if "onExitCodes" in one
    ]
    assert rule["operator"] == "NotIn"
    return set(range(256)) - set(rule["values"])


def test_a_run_that_cannot_be_ends_every_pod_and_fails_the_job(run):
    pods = run("--set", "launcher.wait_s=5", pods=("loop", "engine"))
    assert pods.wait("loop", 120) in failing_codes(pods)
    assert "no pod of trainer has connected within 5 s" in pods.text()
    assert pods.wait("engine", 30) == 0


def test_a_pod_that_finds_no_run_gives_up_aloud(run):
    pods = run("--set", "launcher.wait_s=3", pods=("engine",))
    assert pods.wait("engine", 60) == 1
    assert "no run at big:7077 for 3 s" in pods.text("engine")


def test_a_pod_with_another_roles_secret_is_not_let_in(run):
    pods = run("--set", "launcher.wait_s=6", pods=())
    secret = next(one for (kind, _), one in pods.objects.items() if kind == "Secret")["stringData"]
    secret["trainer"] = "0" * 64
    pods.start("trainer")
    secret["trainer"] = "1" * 64
    pods.start("loop")
    assert pods.wait("loop", 120) in failing_codes(pods)
    assert "is not the supervisor that started this process" in pods.text("trainer")


def test_a_run_directory_that_a_pod_has_not_is_named(run, tmp_path):
    pods = run(pods=("trainer",))
    (tmp_path / "claim/runs").mkdir(exist_ok=True)
    pods.machines["trainer"].hide(tmp_path / "claim")
    pods.start("engine")
    pods.start("loop")
    assert pods.wait("loop", 120) in failing_codes(pods), pods.text()
    assert re.search(r"the run directory \S+ is not on trainer", " ".join(pods.text().split())), pods.text()


@pytest.mark.parametrize("code", [0, 1])
def test_submit_applies_the_manifests(code, tmp_path):
    """To whatever `kubectl` is: here one that says what it was given."""
    (tmp_path / "kubectl").write_text(f'#!/bin/sh\necho "kubectl $*"\nexit {code}\n')
    (tmp_path / "kubectl").chmod(0o755)
    done = subprocess.run(
        [sys.executable, "-m", "atropos_core", "run", "--launcher", "kubernetes", "--bridge", "checkpoint", "--env", "gsm8k", "--set",
         "launcher.image='i'", "--set", "launcher.claim='c'", "--set", "launcher.submit=true", "--dir", str(tmp_path / "run")],
        capture_output=True, text=True, check=False,
        env={**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "HF_HUB_OFFLINE": "1", "COLUMNS": "400"},
    )  # fmt: skip
    assert f"kubectl apply -f {tmp_path}/run/manifests" in done.stdout + done.stderr
    assert (done.returncode == 0) == (code == 0)
    assert code == 0 or "did not start the run" in done.stderr

"""Whole runs of the tiny policy whose engine and trainer are on simulated machines of a Ray cluster, beside the same run without."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.e2e.runs import QUICK, RunningRun, finish, weights

ON_TWO = (
    "--set", "launcher.roles.engine={cpus=1,other={first=1}}",
    "--set", "launcher.roles.trainer={cpus=1,other={second=1}}",
)  # fmt: skip
STARTED_WITHIN_S = 240.0


def arguments(folder: Path, *more: str) -> tuple[str, ...]:
    return ("run", "--bridge", "checkpoint", *QUICK, "--dir", str(folder), *more)


def on(cluster: Any, *more: str) -> tuple[str, ...]:
    return ("--launcher", "ray", "--set", f"launcher.address={cluster.address}", *more)


def roles(folder: Path) -> dict[str, psutil.Process]:
    """The processes of a run that are there, by role: those that `child_main` runs in."""
    found = {}
    for process in psutil.process_iter(["cmdline"]):
        line = process.info["cmdline"] or []
        if "atropos_core.processes.child_main" in line and ":" in line[-2] and _is_of(process, folder):
            found[line[-1]] = process
    return found


def _is_of(process: psutil.Process, folder: Path) -> bool:
    try:
        return process.environ().get("ATROPOS_TEST_RUN") == str(folder)
    except psutil.Error:
        return False


@pytest.fixture
def run(tmp_path, monkeypatch):
    started = []

    def begin(*more: str) -> RunningRun:
        folder = tmp_path / f"run-{len(started)}"
        monkeypatch.setenv("ATROPOS_TEST_RUN", str(folder))
        started.append(RunningRun(folder, *arguments(folder, *more)))
        return started[-1]

    yield begin
    for one in started:
        one.process.kill()
        one.process.wait()


def nothing_is_left(folder: Path, within_s: float = 60.0) -> None:
    until = time.monotonic() + within_s
    while left := roles(folder):
        assert time.monotonic() < until, f"still running: {left}"
        time.sleep(0.1)


TEACHER = (
    "--set", "teacher.large.use=distillation", "--set", "teacher.large.model=tiny-teacher", "--set", "teacher.large.engine.use=hf",
    "--set", "teacher.large.engine.threads=1", "--set", "trainer.distillation.kind=forward",
)  # fmt: skip


def test_the_same_run_file_here_and_on_the_cluster_gives_the_same_weights(cluster, run, tmp_path):
    """With a teacher, whose process is a role as the others are."""
    there = run(*on(cluster, *ON_TWO, *TEACHER, "--set", "launcher.roles.teacher-large={cpus=1,other={head=1}}"))
    there.wait_for_step(1, STARTED_WITHIN_S)
    nodes = {role: node_of(process) for role, process in roles(there.folder).items()}
    assert set(nodes) == {"engine", "trainer", "teacher-large"} and len(set(nodes.values())) == 3, (
        "each on its own machine"
    )
    here = finish(tmp_path / "here", *arguments(tmp_path / "here", *TEACHER))
    assert there.process.wait(STARTED_WITHIN_S) == 0, there.text
    assert weights(there.folder, 9) == weights(here.folder, 9)
    nothing_is_left(there.folder)
    assert (
        "loading" in (there.folder / "logs/trainer.log").read_text().lower()
        or (there.folder / "logs/trainer.log").exists()
    )


def node_of(process: psutil.Process) -> str:
    """The raylet, which is the simulated machine, that a process is of."""
    for parent in process.parents():
        if "raylet" in parent.name():
            return str(parent.pid)
    raise AssertionError(f"{process} is on no machine of the cluster")


@pytest.mark.parametrize("role", ["engine", "trainer"])
def test_a_role_that_is_killed_ends_the_run_by_name_and_a_restart_goes_on(role, cluster, run, tmp_path):
    killed = run(*on(cluster, *ON_TWO, "--set", "restarts=1"))
    killed.wait_for_step(4, STARTED_WITHIN_S)
    roles(killed.folder)[role].send_signal(signal.SIGKILL)
    assert killed.process.wait(STARTED_WITHIN_S) == 0, killed.text
    assert re.search(rf"{role} \(pid \d+ on [\d.]+\) was killed by SIGKILL", killed.text), killed.text
    steps = [json.loads(line)["step"] for line in (killed.folder / "metrics.jsonl").read_text().splitlines()]
    assert steps == list(range(10)), "none twice, none left out"
    nothing_is_left(killed.folder)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_nothing_stays_on_the_cluster_when_the_command_is_ended(number, cluster, run):
    ended = run(*on(cluster, *ON_TWO))
    ended.wait_for_step(2, STARTED_WITHIN_S)
    assert set(roles(ended.folder)) == {"engine", "trainer"}
    ended.process.send_signal(number)
    assert ended.process.wait(150) != 0
    nothing_is_left(ended.folder)
    assert actors(cluster) == [], "and Ray holds none of its actors"


def actors(cluster: Any) -> list[str]:
    """That are not dead, as Ray's head sees them; waits a little for those that are about to be."""
    text = (
        "import ray, time, json\n"
        "from ray._private.state import actors\n"
        f"ray.init({cluster.address!r}, log_to_driver=False, configure_logging=False)\n"
        "until = time.monotonic() + 30\n"
        "while (found := [one['ActorClassName'] for one in actors().values() if one['State'] != 'DEAD']) and time.monotonic() < until:\n"
        "    time.sleep(0.2)\n"
        "print(json.dumps(found))\n"
    )
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, timeout=120, check=True)
    return list(json.loads(done.stdout.splitlines()[-1]))


def refused(*more: str, within_s: float = 150.0, folder: Path) -> str:
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "atropos_core", *arguments(folder, *more)],
        capture_output=True,
        text=True,
        timeout=within_s,
        env={**os.environ, "COLUMNS": "400", "ATROPOS_TEST_RUN": str(folder)},
        check=False,
    )
    assert done.returncode not in (0, 1), done.stdout + done.stderr
    assert "Traceback" not in done.stdout + done.stderr
    assert time.monotonic() - began < within_s
    return done.stdout + done.stderr


def test_what_no_machine_has_room_for_is_refused_by_name(cluster, tmp_path):
    said = refused(*on(cluster, "--set", "launcher.roles.trainer={cpus=7}"), folder=tmp_path / "run")
    assert "no machine of the cluster has room for trainer (7 CPU cores)" in said
    assert said.count("has 1 CPU cores") == 3, said


def test_what_cannot_be_there_at_once_is_refused_and_says_what_is_free(cluster, tmp_path):
    both = "--set", "launcher.roles.engine={other={first=1}}", "--set", "launcher.roles.trainer={other={first=1}}"
    said = refused(*on(cluster, *both, "--set", "launcher.room_deadline_s=2"), folder=tmp_path / "run")
    assert "no room for engine (1 CPU cores, 1 first) and trainer (1 CPU cores, 1 first) at once" in said
    assert "Free are" in said


def test_a_bridge_that_shares_memory_is_refused_before_ray_is_looked_for(tmp_path):
    said = refused(
        "--launcher", "ray", "--bridge", "ipc", "--set", "launcher.address=192.0.2.1:1", folder=tmp_path / "run"
    )  # fmt: skip
    assert "machines that share no memory" in said
    for bridge in ("checkpoint", "delta", "lora"):
        assert f"--bridge {bridge}" in said


def test_a_cluster_that_is_not_there_is_named(tmp_path):
    said = refused("--launcher", "ray", "--set", "launcher.address=127.0.0.1:1", folder=tmp_path / "run", within_s=150)
    assert "finds no cluster at '127.0.0.1:1'" in said and "ray start --head" in said


def test_an_address_that_is_of_another_machine_is_refused(cluster, tmp_path):
    said = refused(*on(cluster, "--set", "launcher.host=198.51.100.7"), folder=tmp_path / "run")
    assert "cannot listen at 198.51.100.7" in said and "Set launcher.host to an address of this machine" in said


def test_a_role_that_the_run_has_not_is_refused(cluster, tmp_path):
    said = refused(*on(cluster, "--set", "launcher.roles.teacher={cpus=1}"), folder=tmp_path / "run")
    assert "launcher.roles.teacher has no effect: there is no such role" in said and "engine, trainer" in said


OVER_TWO = (
    "--set", "trainer.machines=2", "--set", "trainer.threads=1",
    "--set", "launcher.roles.engine={cpus=1,other={head=1}}",
    "--set", "launcher.roles.trainer={cpus=1,other={first=1}}",
    "--set", "launcher.roles.trainer-2={cpus=1,other={second=1}}",
)  # fmt: skip


def test_a_trainer_over_two_machines_of_the_cluster_gives_the_weights_of_two_ranks_here(cluster, run, tmp_path):
    there = run(*on(cluster, *OVER_TWO))
    there.wait_for_step(1, STARTED_WITHIN_S)
    nodes = {role: node_of(process) for role, process in roles(there.folder).items()}
    assert set(nodes) == {"engine", "trainer", "trainer-2"} and len(set(nodes.values())) == 3
    assert there.process.wait(STARTED_WITHIN_S) == 0, there.text
    nothing_is_left(there.folder)
    ranks = ("--set", "trainer.devices=['cpu','cpu']", "--set", "trainer.threads=2")
    here = finish(tmp_path / "here", *arguments(tmp_path / "here", *ranks))
    assert weights(there.folder, 9) == weights(here.folder, 9)


def test_a_machine_of_the_trainer_that_is_killed_is_named_and_a_restart_goes_on(cluster, run):
    killed = run(*on(cluster, *OVER_TWO, "--set", "restarts=1"))
    killed.wait_for_step(4, STARTED_WITHIN_S)
    roles(killed.folder)["trainer-2"].send_signal(signal.SIGKILL)
    assert killed.process.wait(STARTED_WITHIN_S) == 0, killed.text
    assert re.search(r"trainer-2 \(pid \d+ on [\d.]+\) was killed by SIGKILL", killed.text), killed.text
    steps = [json.loads(line)["step"] for line in (killed.folder / "metrics.jsonl").read_text().splitlines()]
    assert steps == list(range(10)), "none twice, none left out"
    nothing_is_left(killed.folder)


def test_a_machine_that_is_lost_ends_the_run_by_name_and_a_restart_goes_on_elsewhere(cluster, run):
    lost = run(*on(cluster, "--set", "launcher.roles.engine={cpus=1,other={first=1}}", "--set", "restarts=2"))
    lost.wait_for_step(4, STARTED_WITHIN_S)
    cluster.say("remove first")
    cluster.say("add first 1")
    assert lost.process.wait(STARTED_WITHIN_S) == 0, lost.text
    assert re.search(
        r"engine \(pid \d+ on [\d.]+\) (was lost|was killed by SIGKILL|closed its connection, and its machine may be lost)",
        lost.text,
    ), lost.text
    steps = [json.loads(line)["step"] for line in (lost.folder / "metrics.jsonl").read_text().splitlines()]
    assert steps == list(range(10))
    nothing_is_left(lost.folder)

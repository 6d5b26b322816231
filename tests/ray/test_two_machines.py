"""A Ray cluster over two machines with addresses of their own (network namespaces), started by `ray start` on each, and runs on it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.runs import QUICK, finish, weights
from tests.machines.network import Machine, Network, why_not
from tests.machines.runs import WITHIN_S, StartedRun, address_of, nothing_is_left, processes

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

PORT = 6379
RAY = (
    sys.executable,
    "-m",
    "ray.scripts.scripts",
    "start",
    "--block",
    "--disable-usage-stats",
    f"--object-store-memory={100 << 20}",
)
WORDS = ("--bridge", "checkpoint", *QUICK, "--set", "trainer.threads=1")
ON_TWO = (
    "--set", "launcher.roles.engine={cpus=1,other={first=1}}",
    "--set", "launcher.roles.trainer={cpus=1,other={second=1}}",
)  # fmt: skip


def node(machine: Machine, log: Path, *words: str) -> subprocess.Popen[bytes]:
    """What Ray writes under /tmp/ray is of this machine alone."""
    machine.hide(Path("/tmp/ray"))
    resources = json.dumps({machine.name: 1})
    own = (f"--node-ip-address={machine.address}", "--num-cpus=2", f"--resources={resources}")
    return machine.start(*RAY, *own, *words, output=log, environment={"RAY_raylet_start_wait_time_s": "120"})


@pytest.fixture(scope="module")
def network(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Network]:
    if why_not():
        pytest.skip(f"this machine makes no namespaces: {why_not()}")
    folder = tmp_path_factory.mktemp("ray")
    Path("/tmp/ray").mkdir(exist_ok=True)
    made = Network(["first", "second"])
    try:
        head = node(made["first"], folder / "first", "--head", f"--port={PORT}", "--include-dashboard=false")
        said(head, folder / "first", "Ray runtime started")
        other = node(made["second"], folder / "second", f"--address={made['first'].address}:{PORT}")
        said(other, folder / "second", "Ray runtime started")
        yield made
    finally:
        made.close()


def said(process: subprocess.Popen[bytes], log: Path, what: str) -> None:
    until = time.monotonic() + 180
    while what not in log.read_text():
        assert process.poll() is None and time.monotonic() < until, log.read_text()
        time.sleep(0.1)


def run(network: Network, folder: Path, *more: str) -> StartedRun:
    on_ray = ("--launcher", "ray", "--set", f"launcher.address={network['first'].address}:{PORT}", *ON_TWO)
    return StartedRun(network["first"], folder, {}, *WORDS, *on_ray, *more)


def test_engine_and_trainer_on_two_machines_give_the_weights_of_one_machine(network, tmp_path):
    over = run(network, tmp_path / "over")
    over.wait_for_step(0)
    seen = {role: address_of(pid) for role, pid in processes(over.folder).items()}
    assert seen == {"engine": network["first"].address, "trainer": network["second"].address}
    over.finish()
    nothing_is_left(over.folder)
    finish(tmp_path / "here", "run", *WORDS, "--dir", str(tmp_path / "here"), deadline_s=WITHIN_S)
    assert weights(over.folder, 9) == weights(tmp_path / "here", 9)


def test_a_trainer_that_is_killed_on_the_other_machine_is_named_and_a_restart_goes_on(network, tmp_path):
    killed = run(network, tmp_path / "run", "--set", "restarts=1")
    killed.wait_for_step(4)
    os.kill(processes(killed.folder)["trainer"], 9)
    killed.finish()
    assert re.search(r"trainer \(.*\) was killed by SIGKILL", killed.text), killed.text
    assert [row["step"] for row in killed.steps()] == list(range(10)), "none twice, none left out"
    nothing_is_left(killed.folder)

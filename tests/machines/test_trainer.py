"""A run whose trainer spans two machines with addresses of their own, beside the same run on one."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.e2e.runs import QUICK, finish, weights
from tests.machines.network import Network, why_not

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

LAUNCHER = f"{Path(__file__).parent}/launcher.py:AgentLauncher"
WITHIN_S = 400.0
RUN = ("--bridge", "checkpoint", *QUICK, "--set", "trainer.threads=1", "--set", "trainer.devices=['cpu']")


@pytest.fixture(scope="module")
def network(tmp_path_factory):
    if why_not():
        pytest.skip(f"this machine makes no namespaces: {why_not()}")
    folder = tmp_path_factory.mktemp("agents")
    made = Network(["first", "second"])
    for name, machine in made.machines.items():
        machine.start(sys.executable, "-m", "tests.machines.agent", str(folder / name), output=folder / f"{name}.out")
        until = time.monotonic() + 60
        while not (folder / name).exists():
            assert time.monotonic() < until, (folder / f"{name}.out").read_text()
            time.sleep(0.05)
    yield made, folder
    made.close()


class Run:
    """`atropos run` on the machine `first`, with the trainer's second process on `second`."""

    def __init__(self, network: tuple[Network, Path], folder: Path, *more: str) -> None:
        machines, agents = network
        first, second = str(agents / "first"), str(agents / "second")
        environment = {
            "ATROPOS_TEST_ROLES": json.dumps({"engine": first, "trainer": first, "trainer-2": second}),
            "ATROPOS_TEST_HOST": machines["first"].address,
            "ATROPOS_TEST_RUN": str(folder),
            "HF_HUB_OFFLINE": "1",
            "COLUMNS": "400",
            "OMP_NUM_THREADS": "1",
        }
        self.folder = folder
        self.output = folder.parent / f"{folder.name}.out"
        self.process = machines["first"].start(
            sys.executable, "-m", "atropos_core", "run", *RUN, "--dir", str(folder), "--launcher", LAUNCHER,
            "--set", "trainer.machines=2", *more, output=self.output, environment=environment,
        )  # fmt: skip

    @property
    def text(self) -> str:
        return self.output.read_text()

    def wait_for_step(self, step: int) -> None:
        metrics, until = self.folder / "metrics.jsonl", time.monotonic() + WITHIN_S
        while not (metrics.exists() and metrics.read_bytes().count(b"\n") > step):
            assert self.process.poll() is None, self.text
            assert time.monotonic() < until, self.text
            time.sleep(0.05)

    def finish(self) -> None:
        assert self.process.wait(WITHIN_S) == 0, self.text

    def steps(self) -> list[dict[str, float]]:
        return [json.loads(line) for line in (self.folder / "metrics.jsonl").read_text().splitlines()]


def processes(folder: Path) -> dict[str, int]:
    """Of a run, by role, as this machine numbers them."""
    found = {}
    for path in Path("/proc").glob("[0-9]*"):
        try:
            line = (path / "cmdline").read_bytes().split(b"\0")
            is_its = f"ATROPOS_TEST_RUN={folder}\0".encode() in (path / "environ").read_bytes()
        except OSError:
            continue
        if is_its and b"atropos_core.processes.child_main" in line:
            found[line[-2].decode()] = int(path.name)
    return found


def nothing_is_left(folder: Path, within_s: float = 30.0) -> None:
    until = time.monotonic() + within_s
    while left := processes(folder):
        assert time.monotonic() < until, left
        time.sleep(0.1)


def address_of(pid: int) -> str:
    done = subprocess.run(
        ["nsenter", f"--target={pid}", "--net", "hostname", "-I"], capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


def test_two_machines_train_as_two_ranks_of_one_machine_do(network, tmp_path):
    over = Run(network, tmp_path / "over")
    over.wait_for_step(0)
    seen = {role: address_of(pid) for role, pid in processes(over.folder).items()}
    assert seen == {"engine": "10.77.0.1", "trainer": "10.77.0.1", "trainer-2": "10.77.0.2"}
    over.finish()
    nothing_is_left(over.folder)
    both = ("--set", "trainer.devices=['cpu','cpu']")
    here = finish(tmp_path / "here", "run", *RUN, *both, "--dir", str(tmp_path / "here"), deadline_s=WITHIN_S)
    assert weights(over.folder, 9) == weights(here.folder, 9)
    alone = ("--steps", "1", "--dir", str(tmp_path / "alone"))
    alone = finish(
        tmp_path / "alone", "run", *(one for one in RUN if one not in ("--steps", "9")), *alone, deadline_s=WITHIN_S
    )
    expected = json.loads((alone.folder / "metrics.jsonl").read_text().splitlines()[1])
    for key in ("loss", "grad_norm"):
        assert over.steps()[1][key] == pytest.approx(expected[key], abs=1e-6), "as one process has it"
    policy = over.folder / "checkpoints/step-000009/policy"
    assert len(list((policy / "trainer_state").glob("*.distcp"))) == 2, "each machine wrote its part"
    back = ("--steps", "11", "--set", "trainer.machines=1", "--set", "launcher.use=local")
    finish(over.folder, "resume", str(over.folder), *back, deadline_s=WITHIN_S)
    assert [row["step"] for row in over.steps()] == list(range(12)), "one process goes on from there"


@pytest.mark.parametrize("role", ["trainer-2", pytest.param("trainer", marks=pytest.mark.long)])
def test_a_machine_of_the_trainer_that_is_killed_is_named_and_a_restart_goes_on(network, tmp_path, role):
    killed = Run(network, tmp_path / "run", "--set", "restarts=1")
    killed.wait_for_step(4)
    os.kill(processes(killed.folder)[role], 9)
    killed.finish()
    assert re.search(rf"{role} \(pid \d+ where {role} belongs\) was killed by SIGKILL", killed.text), killed.text
    assert [row["step"] for row in killed.steps()] == list(range(10)), "none twice, none left out"
    nothing_is_left(killed.folder)


def test_a_machine_without_the_run_directory_is_named_before_a_model_is_loaded(network, tmp_path):
    hidden = tmp_path / "of-the-first"
    hidden.mkdir()
    network[0]["second"].hide(hidden)
    try:
        run = Run(network, hidden / "run")
        assert run.process.wait(WITHIN_S) != 0, run.text
    finally:
        network[0]["second"].run("umount", str(hidden))
    assert f"RunDirectoryError the run directory {hidden}/run is not on second" in " ".join(run.text.split())

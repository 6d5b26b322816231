"""Runs over machines that are none, and what is left of them."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from tests.e2e.runs import QUICK
from tests.machines.network import Machine, Network

LAUNCHER = f"{Path(__file__).parent}/launcher.py:AgentLauncher"
WITHIN_S = 400.0
RUN = ("--bridge", "checkpoint", *QUICK, "--set", "trainer.threads=1", "--set", "trainer.devices=['cpu']")
ROLES = {"engine": "first", "trainer": "first", "trainer-2": "second"}


class StartedRun:
    """`atropos run` on a machine."""

    def __init__(self, machine: Machine, folder: Path, environment: Mapping[str, str], *words: str) -> None:
        own = {"ATROPOS_TEST_RUN": str(folder), "HF_HUB_OFFLINE": "1", "COLUMNS": "400", "OMP_NUM_THREADS": "1"}
        self.folder = folder
        self.output = folder.parent / f"{folder.name}.out"
        self.process = machine.start(
            sys.executable, "-m", "atropos_core", "run", "--dir", str(folder), *words,
            output=self.output, environment={**own, **environment},
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


class Run(StartedRun):
    """On the machine `first`, with each role on the machine that is named for it."""

    def __init__(
        self, network: tuple[Network, Path], folder: Path, *more: str, roles: Mapping[str, str] = ROLES
    ) -> None:
        machines, agents = network
        environment = {
            "ATROPOS_TEST_ROLES": json.dumps({role: str(agents / name) for role, name in roles.items()}),
            "ATROPOS_TEST_HOST": machines["first"].address,
        }
        over = ("--launcher", LAUNCHER, "--set", "trainer.machines=2")
        super().__init__(machines["first"], folder, environment, *RUN, *over, *more)


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


def nothing_is_left(folder: Path, within_s: float = 60.0) -> None:
    until = time.monotonic() + within_s
    while left := processes(folder):
        assert time.monotonic() < until, left
        time.sleep(0.1)


def address_of(pid: int) -> str:
    done = subprocess.run(
        ["nsenter", f"--target={pid}", "--net", "hostname", "-I"], capture_output=True, text=True, check=True
    )
    return done.stdout.strip()

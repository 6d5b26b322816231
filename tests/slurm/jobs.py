"""A run as a job of a real Slurm: rendered by `atropos run`, submitted, watched, and ended."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import psutil

from tests.e2e.runs import QUICK
from tests.slurm.cluster import Slurm

SMALL = ("--set", "launcher.nodes=2", "--set", "launcher.node={cpus=2}", "--set", "launcher.roles.engine={cpus=1}", "--set",
         "launcher.roles.trainer={cpus=2}")  # fmt: skip
WITHIN_S = 240.0


def atropos(slurm: Slurm, *arguments: str, code: int = 0, **more: str) -> str:
    """Typed on the head."""
    done = slurm.network["head"].run(
        sys.executable, "-m", "atropos_core", *arguments, check=False,
        env={**os.environ, **slurm.environment, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "COLUMNS": "400", **more},
    )  # fmt: skip
    said = done.stdout + done.stderr
    assert done.returncode == code and "Traceback" not in said, f"{done.returncode}: {said}"
    return said


class Job:
    """Of a run in `folder`."""

    def __init__(self, slurm: Slurm, folder: Path, *arguments: str) -> None:
        self.slurm = slurm
        self.folder = folder
        self.said = atropos(
            slurm, "run", "--launcher", "slurm", "--bridge", "checkpoint", *arguments, "--dir", str(folder)
        )
        self.submit()

    def submit(self) -> None:
        said = self.slurm.network["head"].run(
            "sbatch", "--parsable", str(self.folder / "job/run.sbatch"),
            env={**os.environ, **self.slurm.environment, "HF_HUB_OFFLINE": "1", "COLUMNS": "160"},
        )  # fmt: skip
        self.number = said.stdout.strip()

    @property
    def text(self) -> str:
        return "".join(path.read_text() for path in sorted((self.folder / "job").glob("*.out")))

    def state(self) -> str:
        return (
            self.slurm.run("scontrol", "show", "job", "-o", self.number, check=False)
            .partition("JobState=")[2]
            .split(" ")[0]
        )

    def wait(self, *states: str, within_s: float = WITHIN_S) -> str:
        until = time.monotonic() + within_s
        while (state := self.state()) not in states:
            assert time.monotonic() < until, f"{state}, and not {states}, after {within_s} s:\n{self.text}"
            time.sleep(0.2)
        return state

    def wait_for_step(self, step: int) -> None:
        metrics = self.folder / "metrics.jsonl"
        until = time.monotonic() + WITHIN_S
        while not (metrics.exists() and metrics.read_bytes().count(b"\n") > step):
            assert self.state() in ("PENDING", "RUNNING", "CONFIGURING"), f"{self.state()}:\n{self.text}"
            assert time.monotonic() < until, f"no step {step}:\n{self.text}"
            time.sleep(0.05)

    def steps(self) -> list[int]:
        return [json.loads(line)["step"] for line in (self.folder / "metrics.jsonl").read_text().splitlines()]

    def processes(self) -> dict[str, psutil.Process]:
        """Of the run, by role; `loop` is what the script has started."""
        found = {}
        for process in psutil.process_iter(["cmdline", "environ"]):
            line = process.info["cmdline"] or []
            if (process.info["environ"] or {}).get("SLURM_JOB_ID") != self.number:
                continue
            if "atropos_core.processes.child_main" in line and line[0] == sys.executable:
                found[line[-1]] = process
            elif "atropos_core" in line:
                found["loop"] = process
        return found

    def nothing_is_left(self, within_s: float = 60.0) -> None:
        until = time.monotonic() + within_s
        while left := self.processes():
            assert time.monotonic() < until, f"still running: {left}"
            time.sleep(0.1)


def node_of(process: psutil.Process) -> str:
    """The host name of the machine that it is on."""
    return subprocess.run(
        ["nsenter", f"--target={process.pid}", "--uts", "hostname"], capture_output=True, text=True, check=True
    ).stdout.strip()


__all__ = ["QUICK", "SMALL", "Job", "atropos", "node_of"]

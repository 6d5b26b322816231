"""Real runs of the tiny policy as processes that can be watched and killed. The soak uses it as well."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil

QUICK = (
    "--env", "gsm8k", "--deterministic", "--steps", "9",
    "--set", "training.groups_per_step=4", "--set", "training.group_size=4",
    "--set", "checkpoint.every=3", "--set", "evaluation.problems=8",
)  # fmt: skip


class RunningRun:
    """`atropos ARGUMENTS` in `folder`, with its children."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        self.folder = folder
        self.output = folder.parent / f"{folder.name}.out"
        with self.output.open("ab") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "atropos_core", *arguments],
                stdout=output,
                stderr=output,
                env={**os.environ, "HF_HUB_OFFLINE": "1", "COLUMNS": "160"},
            )
        self.supervisor = psutil.Process(self.process.pid)
        self.children: dict[str, psutil.Process] = {}

    @property
    def text(self) -> str:
        return self.output.read_text()

    def wait_for_step(self, step: int, deadline_s: float = 120) -> None:
        """Until metrics.jsonl has this step. Remembers the children by role on the way."""
        metrics = self.folder / "metrics.jsonl"
        until = time.monotonic() + deadline_s
        while not (metrics.exists() and metrics.read_bytes().count(b"\n") > step):
            assert self.process.poll() is None, f"the run ended too early:\n{self.text}"
            assert time.monotonic() < until, f"no step {step} within {deadline_s} s:\n{self.text}"
            time.sleep(0.01)
        self.children = {}
        for child in self.supervisor.children(recursive=True):
            with contextlib.suppress(psutil.Error):  # it may have ended just now
                self.children |= dict.fromkeys(child.cmdline()[-1:], child)

    def kill(self, role: str) -> None:
        (self.supervisor if role == "supervisor" else self.children[role]).send_signal(signal.SIGKILL)

    def ended_within(self, seconds: float) -> int:
        """The exit code; fails where any process of the run outlives the deadline."""
        until = time.monotonic() + seconds
        code = self.process.wait(seconds)
        _, alive = psutil.wait_procs(list(self.children.values()), max(until - time.monotonic(), 0.1))
        assert not alive, f"still running: {alive}"
        return code


def finish(folder: Path, *arguments: str, deadline_s: float = 300) -> RunningRun:
    """A whole run, to its end, or to the test's."""
    run = RunningRun(folder, *arguments)
    try:
        assert run.process.wait(deadline_s) == 0, run.text
    finally:
        run.process.kill()
    return run


def weights(folder: Path, step: int) -> bytes:
    return (folder / f"checkpoints/step-{step:06d}/policy/model.safetensors").read_bytes()

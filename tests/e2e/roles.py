"""The roles of a run as processes of their own: a server, a trainer, workers."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import psutil

from tests.conftest import metrics_of


class Role:
    """`atropos ARGUMENTS` in `folder`; what it says goes to a file."""

    def __init__(self, folder: Path, name: str, arguments: Sequence[str], before: Sequence[str] = ()) -> None:
        self.output = folder / f"{name}.out"
        with self.output.open("ab") as output:
            self.process = subprocess.Popen(
                [*before, sys.executable, "-m", "atropos_core", *arguments],
                cwd=folder,
                stdout=output,
                stderr=output,
                env={**os.environ, "HF_HUB_OFFLINE": "1", "COLUMNS": "160", "PYTHONUNBUFFERED": "1"},
            )

    @property
    def text(self) -> str:
        return self.output.read_text()

    def says(self, pattern: str, deadline_s: float = 60) -> str:
        """Wait for it to say this; what the pattern's first group is, or all of it."""
        until = time.monotonic() + deadline_s
        while not (found := re.search(pattern, self.text)):
            assert self.process.poll() is None, f"{self.output.stem} ended:\n{self.text}"
            assert time.monotonic() < until, f"{self.output.stem} never printed {pattern!r}:\n{self.text}"
            time.sleep(0.05)
        return found[1] if found.re.groups else found[0]

    def ends(self, deadline_s: float = 60) -> int:
        """The exit code."""
        try:
            return self.process.wait(deadline_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"{self.output.stem} did not end within {deadline_s} s:\n{self.text}") from None

    def terminate(self, deadline_s: float = 60) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.ends(deadline_s)

    def kill(self) -> None:
        """With whatever it started."""
        if self.process.poll() is None:
            children = psutil.Process(self.process.pid).children(recursive=True)
            self.process.kill()
            self.process.wait(60)
            psutil.wait_procs(children, 60)


class Scene:
    """One folder, one server, whatever else a test starts."""

    def __init__(self, folder: Path, *serve: str) -> None:
        self.folder = folder
        self.roles: list[Role] = []
        self._serve = serve
        self.server = self.serve()
        self.url = self.server.says(r"(https?://[\w.:-]+)").rstrip(".")

    def serve(self, *more: str) -> Role:
        return self.start("serve", "serve", "--port", "0", "--dir", "api", *self._serve, *more)

    def start(self, name: str, *arguments: str, before: Sequence[str] = ()) -> Role:
        self.roles.append(Role(self.folder, name, arguments, before))
        return self.roles[-1]

    def worker(self, number: int, environment: str, *more: str) -> Role:
        return self.start(f"worker-{number}", "env", environment, "--api", self.url, *more)

    def train(self, *more: str) -> Role:
        return self.start("train", "train", "--api", self.url, "--dir", "run", *more)

    def wait_for_step(self, step: int, trainer: Role, deadline_s: float = 120) -> None:
        until = time.monotonic() + deadline_s
        file = self.folder / "run/metrics.jsonl"
        while not (file.exists() and file.read_bytes().count(b"\n") > step):
            assert trainer.process.poll() is None, f"the trainer ended:\n{trainer.text}"
            assert time.monotonic() < until, "\n".join([f"no step {step}", *(role.text for role in self.roles)])
            time.sleep(0.02)

    @property
    def metrics(self) -> list[dict[str, float]]:
        return metrics_of(self.folder / "run")

    @property
    def all_text(self) -> str:
        return "\n".join(f"--- {role.output.stem}\n{role.text}" for role in self.roles)


@contextmanager
def scene(folder: Path, *serve: str) -> Iterator[Scene]:
    made = None
    try:
        made = Scene(folder, *serve)
        yield made
    finally:
        for role in made.roles if made else ():
            role.kill()

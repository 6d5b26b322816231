"""Both servers, and programs of atroposlib's, as processes."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import ClassVar

import httpx

REPOSITORY = Path(__file__).parents[2]
TINY = REPOSITORY / "plugins/env_gsm8k/atropos_env_gsm8k/tiny"
QUIET = {"HF_HUB_OFFLINE": "1", "WANDB_MODE": "disabled", "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1"}


class Process:
    """One process whose output is kept in a file."""

    started: ClassVar[list[Process]] = []  # of the present test, which may fail before it ends them

    def __init__(self, log: Path, *command: str) -> None:
        self.log = log
        with log.open("wb") as out:
            self.process = subprocess.Popen(
                command, stdout=out, stderr=subprocess.STDOUT, env={**os.environ, **QUIET}, cwd=REPOSITORY
            )
        self.started.append(self)

    @property
    def text(self) -> str:
        return self.log.read_text(errors="replace")

    def wait_for(self, pattern: str, deadline_s: float = 120) -> re.Match[str]:
        until = time.monotonic() + deadline_s
        while time.monotonic() < until:
            if found := re.search(pattern, self.text):
                return found
            assert self.process.poll() is None, f"ended with {self.process.returncode}:\n{self.text}"
            time.sleep(0.05)
        raise AssertionError(f"no {pattern!r} within {deadline_s} s:\n{self.text}")

    def ended_within(self, deadline_s: float) -> int:
        try:
            return self.process.wait(deadline_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still there after {deadline_s} s:\n{self.text[-4000:]}") from None

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(20)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()


class OurServer(Process):
    """`atropos serve`."""

    def __init__(self, directory: Path, *flags: str, port: int = 0) -> None:
        log = directory.with_name(f"{directory.name}-{time.monotonic_ns()}.log")
        super().__init__(
            log, sys.executable, "-m", "atropos_core", "serve", "--port", str(port), "--dir", str(directory), *flags
        )
        self.url = self.wait_for(r"listening on (https?://\S+)").group(1)


class TheirServer(Process):
    """`run-api`, which gets a port and prints nothing when it listens."""

    def __init__(self) -> None:
        import tempfile

        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self._folder = tempfile.TemporaryDirectory()
        log = Path(self._folder.name) / "log"
        super().__init__(
            log,
            os.environ["ATROPOSLIB_PYTHON"],
            "-m",
            "atroposlib.cli.run_api",
            "--host",
            "127.0.0.1",
            "--port",
            str(port),
        )
        self.url = f"http://127.0.0.1:{port}"
        until = time.monotonic() + 120
        while True:
            try:
                httpx.get(self.url)
                return
            except httpx.ConnectError:
                assert time.monotonic() < until and self.process.poll() is None, self.text
                time.sleep(0.1)

    def end(self) -> None:
        super().end()
        self._folder.cleanup()


def client(log: Path, program: str, *arguments: str) -> Process:
    """A program of this directory, by atroposlib's Python."""
    return Process(log, os.environ["ATROPOSLIB_PYTHON"], str(Path(__file__).parent / program), *arguments)

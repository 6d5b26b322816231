"""Groups as workers send them, and a server that a test may kill."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from atropos_core.types import Draw, Episode, Rollout, Sampling, ScoredGroup, Task

VOCABULARY = 100
START_S = 120


def drawn(number: int, environment: str = "words") -> Draw:
    return Draw(number, environment, "train", number, 7 * number)


def group_of(draw: Draw, length: int = 16, members: int = 4, version: int = 0) -> ScoredGroup:
    """A group whose tokens tell its draw: none is like another."""
    random = np.random.default_rng(abs(draw.seed))

    def rollout() -> Rollout:
        sampled = np.arange(length) >= length // 2
        logprobs = np.where(sampled, -random.random(length), 0).astype(np.float32)
        tokens = random.integers(0, VOCABULARY, length).astype(np.int32)
        return Rollout(tokens, sampled, sampled, logprobs, np.full(length, version, np.int32), 1.0)

    episodes = tuple(Episode((rollout(),), float(member)) for member in range(members))
    return ScoredGroup(draw, Task(f"t{draw.id}", ()), episodes, np.arange(members, dtype=np.float32))


class Server:
    """`atropos serve` on one port, again and again."""

    def __init__(self, directory: Path, *options: str, same_host: bool = False) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = int(probe.getsockname()[1])
        self.url = f"http://127.0.0.1:{self.port}"
        self._directory = directory
        self._options = [*options, "--same-host" if same_host else "--no-same-host"]
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Return once it listens."""
        command = [sys.executable, "-m", "atropos_core", "serve", "--port", str(self.port)]
        command += ["--dir", str(self._directory / "api"), *self._options]
        with (self._directory / "serve.log").open("ab") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log, env={**os.environ, "COLUMNS": "160"})
        until = time.monotonic() + START_S
        while True:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 1):
                return
            text = (self._directory / "serve.log").read_text()
            assert self._process.poll() is None and time.monotonic() < until, f"the server did not start:\n{text}"
            time.sleep(0.02)

    def limit_files(self, size_bytes: int | None) -> None:
        """No file of the server may grow beyond that, as on a disk that is full."""
        assert self._process is not None
        most = resource.prlimit(self._process.pid, resource.RLIMIT_FSIZE)[1]
        resource.prlimit(self._process.pid, resource.RLIMIT_FSIZE, (most if size_bytes is None else size_bytes, most))

    def kill(self) -> None:
        """kill -9."""
        assert self._process is not None
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()

    def stop(self) -> int:
        """SIGTERM; the exit code."""
        assert self._process is not None
        self._process.terminate()
        return self._process.wait(60)


@contextlib.contextmanager
def serving(directory: Path, *options: str, same_host: bool = False) -> Iterator[Server]:
    server = Server(directory, *options, same_host=same_host)
    server.start()
    try:
        yield server
    finally:
        server.kill()


SAMPLING = Sampling(max_tokens=8)

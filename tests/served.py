"""A server of the trajectory API as a process: started on a free port, watched, ended."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.raw_http import Answer, Connection, request

START_S = 90
JSON = {"content_type": "application/json"}


@dataclass
class Server:
    port: int
    process: psutil.Process

    def rss(self) -> int:
        return int(self.process.memory_info().rss)

    def cpu_s(self) -> float:
        times = self.process.cpu_times()
        return float(times.user + times.system)

    def call(self, data: bytes) -> Answer:
        end = Connection(self.port)
        try:
            return end.call(data)
        finally:
            end.close()

    def metrics(self) -> dict[str, float]:
        """/metrics, by name and labels as they stand there."""
        answer = self.call(request("GET", "/metrics"))
        assert answer.status == 200, answer
        lines = (line for line in answer.body.decode().splitlines() if not line.startswith("#"))
        return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines)}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def atropos_serve(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "atropos_core", "serve", *arguments]


@contextmanager
def serving(command: Sequence[str], output: Path) -> Iterator[Server]:
    """`command --host 127.0.0.1 --port FREE`, from its first answer on; its text goes to `output`."""
    port = free_port()
    with output.open("ab") as file:
        process = subprocess.Popen(
            [*command, "--host", "127.0.0.1", "--port", str(port)], stdout=file, stderr=subprocess.STDOUT
        )
    try:
        server = Server(port, psutil.Process(process.pid))
        _wait_for_answer(server, process, output)
        yield server
    finally:
        process.terminate()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait_for_answer(server: Server, process: subprocess.Popen[bytes], output: Path) -> None:
    until = time.monotonic() + START_S
    while True:
        try:
            if server.call(request("GET", "/info")).status < 500:
                return
        except ConnectionError as error:
            if process.poll() is not None or time.monotonic() > until:
                raise AssertionError(f"the server did not start:\n{output.read_text()}") from error
        time.sleep(0.05)

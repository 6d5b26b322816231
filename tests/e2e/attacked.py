"""A good client beside attackers of one kind: what its calls take, and what the server's memory does."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from tests.raw_http import Connection, request
from tests.served import Server

CALL_S = 0.01  # between two calls of the good client
DEADLINE_S = 30.0
BACK_S = 20.0  # in which memory comes back
STARTING_S = 60.0


@dataclass
class Attacked:
    """`seconds` of each call, on a kept connection and on a new one by turns."""

    attacks: int = 0
    seconds: list[float] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    rss_bytes: tuple[int, int, int] = (0, 0, 0)  # before, at most, after
    cpu_s: float = 0.0  # of the server

    def quantile_ms(self, share: float) -> float:
        return sorted(self.seconds)[int(share * (len(self.seconds) - 1))] * 1e3


def attacked(server: Server, kind: str, attackers: int, seconds: float) -> Attacked:
    found, before = Attacked(), server.rss()
    highest, stop = [before], threading.Event()

    def watch() -> None:
        while not stop.wait(0.02):
            highest[0] = max(highest[0], server.rss())

    watching = threading.Thread(target=watch, daemon=True)
    watching.start()
    try:
        with _attackers(server.port, kind, attackers, seconds) as processes:
            cpu_s = server.cpu_s()
            call_for(server.port, seconds, found)
            found.cpu_s = server.cpu_s() - cpu_s
            found.attacks = sum(int(process.communicate(timeout=STARTING_S)[0] or 0) for process in processes)
    finally:
        stop.set()
        watching.join()
    until = time.monotonic() + BACK_S
    while server.rss() - before > 8e6 and time.monotonic() < until:
        time.sleep(0.1)
    found.rss_bytes = (before, highest[0], server.rss())
    return found


def call_for(port: int, seconds: float, found: Attacked) -> None:
    until, end, number = time.monotonic() + seconds, Connection(port, DEADLINE_S), 0
    while time.monotonic() < until:
        number += 1
        began = time.perf_counter()
        try:
            if number % 2:
                end.close()
                end = Connection(port, DEADLINE_S)
            status = end.call(request("GET", "/info")).status
            if status != 200:
                found.failures.append(f"answered {status}")
        except OSError as error:
            found.failures.append(repr(error))
            end.close()
            end = Connection(port, DEADLINE_S)
        found.seconds.append(time.perf_counter() - began)
        time.sleep(CALL_S)
    end.close()


@contextlib.contextmanager
def _attackers(port: int, kind: str, count: int, seconds: float) -> Iterator[list[subprocess.Popen[str]]]:
    command = [sys.executable, "-m", "tests.e2e.attacks", kind, str(port), str(seconds)]
    processes = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(count)
    ]
    try:
        for process in processes:
            assert process.stdout is not None and process.stdout.readline() == "ready\n"
        for process in processes:
            assert process.stdin is not None
            process.stdin.write("\n")
            process.stdin.flush()
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.wait()

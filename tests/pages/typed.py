"""The commands of a page, typed as they stand, in a network of their own: its ports are free, and the addresses that pages
use are this machine's."""

from __future__ import annotations

import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import psutil

from tests.warm.forked import enter_network
from tests.warm.requests import start_template

ADDRESSES = ("10.0.0.5", "10.0.0.6", "10.0.0.7")
SMALL = " --set training.groups_per_step=2 --set training.group_size=2 --set evaluation.problems=4"
ENDS_BY_ITSELF = r"atropos (run|train|eval|check|new|adapter|config)\b|curl |\(|python"
# What starts processes that import torch and has no word that a shell reads otherwise is started without one, so that it is warm.
PLAIN = r"atropos ((?:run|train|env|engine|eval|check)(?: +[\w./:=,@-]+)*)\s*"


class Typed:
    """Commands in one folder and one network, which end with the block that began them."""

    def __init__(self, folder: Path, network: str) -> None:
        self.folder = folder
        self._network = network
        self._before = ["ip", "netns", "exec", network]
        self._running: list[tuple[str, Path, subprocess.Popen[bytes]]] = []

    def begin(self, command: str) -> Path:
        """Type it and go on; what it says is in the file that this gives."""
        message = self.folder / f"{len(self._running)}.output"
        here = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        environment = {
            **os.environ, "PATH": here, "HF_HUB_OFFLINE": "1", "COLUMNS": "160", "OMP_NUM_THREADS": "1",
            "PYTHONUNBUFFERED": "1",
        }  # fmt: skip
        with message.open("wb") as output:

            def started(words: Sequence[str]) -> subprocess.Popen[bytes]:
                return subprocess.Popen(
                    words, cwd=self.folder, stdout=output, stderr=output, start_new_session=True, env=environment
                )

            if plain := re.fullmatch(PLAIN, command):
                words = [sys.executable, "-m", "atropos_core", *plain[1].split()]
                process = self._within_the_network(lambda: started(words))
            else:
                process = started([*self._before, "bash", "-c", command])
        self._running.append((command, message, process))
        return message

    def _within_the_network(self, start: Callable[[], subprocess.Popen[bytes]]) -> subprocess.Popen[bytes]:
        """By a thread that goes there, and ends."""
        start_template()

        def there() -> subprocess.Popen[bytes]:
            with open(f"/run/netns/{self._network}") as network:
                enter_network(network.fileno())
            return start()

        with ThreadPoolExecutor(1) as thread:
            return thread.submit(there).result()

    def type(self, command: str, deadline_s: float = 120) -> str:
        """Type it and wait for its end, which must be a good one. Its output."""
        message = self.begin(command)
        return self.ends_well(message, deadline_s)

    def ends_well(self, message: Path, deadline_s: float = 120) -> str:
        [(command, _, process)] = [one for one in self._running if one[1] == message]
        try:
            code = process.wait(deadline_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"{command} did not end within {deadline_s:g} s\n{self.text}") from None
        assert code == 0, f"{command} ended with {code}\n{self.text}"
        return message.read_text()

    def says(self, message: Path, pattern: str, deadline_s: float = 60) -> None:
        until = time.monotonic() + deadline_s
        [(command, _, process)] = [one for one in self._running if one[1] == message]
        while not re.search(pattern, message.read_text()):
            assert process.poll() is None and time.monotonic() < until, (
                f"{command} never printed {pattern}\n{self.text}"
            )
            time.sleep(0.05)

    @property
    def text(self) -> str:
        return "\n".join(f"--- {command}\n{message.read_text()}" for command, message, _ in self._running)

    def end(self) -> None:
        """All that still runs, with whatever it started."""
        for _, _, process in reversed(self._running):
            if process.poll() is None:
                children = psutil.Process(process.pid).children(recursive=True)
                os.killpg(process.pid, signal.SIGTERM)
                try:
                    process.wait(20)
                except subprocess.TimeoutExpired:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait(10)
                for child in psutil.wait_procs(children, 10)[1]:
                    child.kill()


def can_type() -> str:
    """Why no network of its own can be had here; empty where it can."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        return "a network namespace needs root and the command `ip`"
    return ""


@contextmanager
def typing(folder: Path) -> Iterator[Typed]:
    network = f"pages{secrets.token_hex(4)}"
    subprocess.run(["ip", "netns", "add", network], check=True)
    typed = Typed(folder, network)
    try:
        for command in ("link set lo up", *(f"addr add {address}/32 dev lo" for address in ADDRESSES)):
            subprocess.run(["ip", "-n", network, *command.split()], check=True)
        yield typed
    finally:
        typed.end()
        subprocess.run(["ip", "netns", "delete", network], check=True)


def alike(shown: str) -> str:
    """A pattern of a line that a page shows: figures and the name of the machine may be others."""
    escaped = re.escape(re.sub(r"\s+", " ", shown.strip())).replace(r"\(\+", r"\([+-]")
    return re.sub(r"(?:\d[\d,.:\\]*)+", lambda _: r"[\d,.:e-]+", escaped).replace("laptop", r"[\w.-]+")

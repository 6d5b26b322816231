"""Kills of server, trainer and producers, and what is in the commit log afterwards. The test kills five times, the soak
a hundred.

What was acknowledged to a producer must be in the log of the trainer's last checkpoint exactly once. What was not may be
in it once. For the old protocol, whose requests carry no key, there is one more case: a POST whose answer was cut off by
two deaths of the server, one after the other, may be in it twice, since only the last death's leftovers are looked
through when the client repeats itself.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import httpx

from tests.e2e.api_programs import LEASE_LOST
from tests.served import atropos_serve, free_port

PRODUCERS = ("http", "ring", "old", "pieces")
KINDS = ("server", "journal write", "trainer", "frozen trainer", "slot write", *PRODUCERS)
HUB_MB, SILENT_S, LEASE_S = 1, 4, 8
START_S, PROGRESS_S, END_S = 60, 60, 120
JOURNAL_WRITES = 150  # at most, before the one that is cut short
ENVIRONMENT = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1", "COLUMNS": "160"}


@dataclass
class Outcome:
    """What the commit log has, beside what was acknowledged."""

    kills: list[str]
    seconds: float
    acknowledged: int
    trained: int  # units in the log
    checkpoints: int
    lost: list[int]  # acknowledged, not in the log
    twice: list[int]
    excused: list[int]  # twice, and allowed to be
    unknown: list[int]  # nobody ever sent it
    torn: list[str]
    half_written: list[int]  # in the log although their slot was never finished
    unacknowledged: int  # in the log once: the answer was lost with its producer
    tracebacks: int  # in the server's output
    recoveries_s: list[float] = field(default_factory=list)  # from a server's death to the first answer of the next

    def missed(self) -> list[str]:
        """Promises that were broken."""
        wrong: dict[str, Sequence[object]] = {
            "lost": self.lost,
            "twice": self.twice,
            "never sent": self.unknown,
            "torn": self.torn,
            "from a slot that was never finished": self.half_written,
        }
        found = [f"{len(units)} {what}: {units[:5]}" for what, units in wrong.items() if units]
        if self.tracebacks:
            found.append(f"{self.tracebacks} tracebacks of the server")
        if not self.trained:
            found.append("nothing was trained")
        return found


class Scene:
    """One server, one trainer, four producers: each a process that is started again when it dies."""

    def __init__(self, folder: Path, api: Path | None = None, *serve: str) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._arguments = [
            "--port", str(self.port), "--dir", str(api or folder / "api"), "--hub-mb", str(HUB_MB),
            "--silent-s", str(SILENT_S), "--lease-s", str(LEASE_S), "--hold-s", "5", *serve,
        ]  # fmt: skip
        self.running: dict[str, subprocess.Popen[bytes]] = {}
        self.recoveries_s: list[float] = []

    def open(self) -> None:
        self.start_server()
        for role in ("trainer", *PRODUCERS):
            self.start(role)
        self.wait_for_progress()

    def start_server(self) -> None:
        since = time.monotonic()
        self._spawn("server", atropos_serve(*self._arguments))
        self.wait("the server did not start", START_S, self.is_up)
        self.recoveries_s.append(time.monotonic() - since)

    def start_dying_server(self, after: int, written: float) -> None:
        """It ends in its write number `after` to the journal, of which this share is written."""
        dying = [sys.executable, "-m", "tests.e2e.api_programs", "dying-server", str(after), str(written)]
        self._spawn("server", [*dying, "serve", *self._arguments])

    def is_up(self) -> bool:
        try:
            return httpx.get(f"{self.url}/health", timeout=5, trust_env=False).status_code == 200
        except httpx.TransportError:
            assert self.running["server"].poll() is None, f"the server ended:\n{self.text('server')[-4000:]}"
            return False

    def start(self, role: str) -> None:
        number = PRODUCERS.index(role) + 1 if role in PRODUCERS else 0
        program = ["-m", "tests.e2e.api_programs", role, self.url, str(self.folder), role, str(number)]
        self._spawn(role, [sys.executable, *program])

    def kill(self, role: str, number: signal.Signals = signal.SIGKILL) -> None:
        self.running[role].send_signal(number)
        self.running[role].wait(END_S)

    def text(self, role: str) -> str:
        return (self.folder / f"{role}.out").read_text()

    def acknowledged(self) -> Counter[str]:
        return Counter({name: len(self.lines(name, "acked")) for name in PRODUCERS})

    def lines(self, name: str, what: str) -> list[int]:
        path = self.folder / f"{name}.{what}"
        return [int(line) for line in path.read_text().split()] if path.exists() else []

    def wait_for_progress(self) -> None:
        """Every producer gets something acknowledged, and the trainer saves a checkpoint."""
        before, saved = self.acknowledged(), self.newest()

        def all_went_on() -> bool:
            self.keep_trainer()
            now = self.acknowledged()
            return self.newest() != saved and all(now[name] > before[name] for name in PRODUCERS)

        self.wait("not everyone got on", PROGRESS_S, all_went_on)

    def newest(self) -> Path | None:
        return max((self.folder / "checkpoints").glob("step-*"), default=None)

    def has_ended(self, role: str) -> bool:
        return self.running[role].poll() is not None

    def keep_trainer(self) -> None:
        """One that lost its lease is started again, as its user would."""
        if self.running["trainer"].poll() == LEASE_LOST:
            self.start("trainer")

    def fault(self, kind: str) -> None:
        """Kill, and start again."""
        if kind == "server":
            self.kill("server")
            time.sleep(random.choice((0.0, 0.0, 0.0, random.uniform(2, 10))))
            self.start_server()
        elif kind == "journal write":
            self.kill("server")
            self.start_dying_server(random.randrange(JOURNAL_WRITES), random.random())
            self.wait("the dying server outlived its writes", END_S, partial(self.has_ended, "server"))
            assert self.running["server"].returncode == -signal.SIGKILL, self.text("server")[-4000:]
            self.start_server()
        elif kind == "frozen trainer":  # it wakes when its lease has run out, and finds out
            self.running["trainer"].send_signal(signal.SIGSTOP)
            time.sleep(LEASE_S + random.uniform(1, 3))
            self.running["trainer"].send_signal(signal.SIGCONT)
            self.wait("the trainer kept its lease", END_S, partial(self.has_ended, "trainer"))
            self.keep_trainer()
        elif kind == "slot write":
            self.kill("ring", signal.SIGUSR1)
            assert self.running["ring"].returncode == -signal.SIGKILL, self.text("ring")[-4000:]
            self.start("ring")
        else:
            self.kill(kind)
            self.start(kind)

    def finish(self) -> None:
        """Producers end what is under way; the trainer trains what is left."""
        for name in PRODUCERS:
            self.running[name].send_signal(signal.SIGTERM)
        for name in PRODUCERS:
            self.wait(f"{name} did not end", END_S, partial(self.has_ended, name))
            assert self.running[name].returncode == 0, f"{name}:\n{self.text(name)[-4000:]}"
        (self.folder / "finish").touch()

        def trained() -> bool:
            self.keep_trainer()
            return self.has_ended("trainer")

        self.wait("the trainer did not end", END_S, trained)
        assert self.running["trainer"].returncode == 0, self.text("trainer")[-4000:]
        self.kill("server", signal.SIGTERM)

    def close(self) -> None:
        for process in self.running.values():
            if process.poll() is None:
                process.kill()
                process.wait()

    def _spawn(self, role: str, command: Sequence[str]) -> None:
        with (self.folder / f"{role}.out").open("ab") as output:
            self.running[role] = subprocess.Popen(command, stdout=output, stderr=output, env=ENVIRONMENT)

    def wait(self, otherwise: str, deadline_s: float, holds: Callable[[], bool]) -> None:
        until = time.monotonic() + deadline_s
        while not holds():
            for role, process in self.running.items():
                ended = process.poll()
                expected = (None, 0, -signal.SIGKILL, LEASE_LOST) if role in ("trainer", "server") else (None, 0, -9)
                assert ended in expected, f"{role} ended with {ended}:\n{self.text(role)[-4000:]}"
            assert time.monotonic() < until, f"{otherwise} within {deadline_s} s:\n{self.printed()}"
            time.sleep(0.02)

    def printed(self) -> str:
        return "\n".join(f"--- {role}\n{self.text(role)[-1500:]}" for role in self.running)

    def outcome(self, kills: Sequence[str], seconds: float) -> Outcome:
        newest = self.newest()
        assert newest is not None, "nothing was ever saved"
        log = Counter(json.loads((newest / "policy/log.json").read_text()))
        state = json.loads((newest / "manifest.json").read_text())["state"]
        acked = {serial for name in PRODUCERS for serial in self.lines(name, "acked")}
        tried = {serial for name in PRODUCERS for serial in self.lines(name, "tried")}
        cut = Counter(serial for name in PRODUCERS for serial in self.lines(name, "cut"))
        twice = [serial for serial, n in log.items() if n > 1]
        excused = [serial for serial in twice if log[serial] == 2 and cut[serial] >= 2]
        return Outcome(
            kills=list(kills),
            seconds=seconds,
            acknowledged=len(acked),
            trained=log.total(),
            checkpoints=int(newest.name.removeprefix("step-")),
            lost=sorted(acked - log.keys()),
            twice=[serial for serial in twice if serial not in excused],
            excused=excused,
            unknown=sorted(log.keys() - tried),
            torn=state["torn"],
            half_written=[serial for serial in self.lines("ring", "torn") if serial in log],
            unacknowledged=len(log.keys() - acked),
            tracebacks=self.text("server").count("Traceback"),
            recoveries_s=self.recoveries_s[1:],
        )


def killed(folder: Path, kinds: Sequence[str], *, tell: Callable[[str], None] = lambda printed: None) -> Outcome:
    """One kill of each of these kinds, in this order, at random moments. Raises AssertionError where someone does not
    get on afterwards."""
    scene = Scene(folder)
    since = time.monotonic()
    try:
        scene.open()
        for number, kind in enumerate(kinds):
            time.sleep(random.uniform(0.0, 1.5))
            scene.fault(kind)
            scene.wait_for_progress()
            tell(f"{number + 1} of {len(kinds)}: {kind}; acknowledged: {scene.acknowledged().total()}")
        scene.finish()
        return scene.outcome(kinds, time.monotonic() - since)
    finally:
        scene.close()


@contextlib.contextmanager
def filled(disk: Path) -> Iterator[None]:
    """The disk has no room until this ends."""
    ballast = disk / "ballast"
    with contextlib.suppress(OSError):  # full
        ballast.write_bytes(bytes(os.statvfs(disk).f_blocks * os.statvfs(disk).f_frsize))
    yield
    ballast.unlink()


def full_disk(folder: Path, disk: Path) -> Outcome:
    """As `killed`, with the server's directory on `disk`: it is full for a while, in which the server is killed twice."""
    scene = Scene(folder, disk / "api")
    since = time.monotonic()
    try:
        scene.open()
        with filled(disk):
            scene.wait("the disk was never full", PROGRESS_S, lambda: bool(scene.lines("http", "full")))
            for _ in range(2):
                time.sleep(random.uniform(0.2, 1.0))
                scene.fault("server")
                time.sleep(1.0)
                assert scene.is_up(), "on a full disk as well"
        scene.wait_for_progress()
        scene.finish()
        return scene.outcome(["server on a full disk"] * 2, time.monotonic() - since)
    finally:
        scene.close()

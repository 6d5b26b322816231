"""The contract of a launcher: a process starts, answers, prints into its log, ends when told to, and leaves nothing behind.

Processes that it starts itself are looked for if they run on this machine. Not tested: that it ends when our process is killed.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from atropos_core.errors import AtroposError
from atropos_core.launchers import Launcher
from atropos_core.processes.child import Child
from atropos_testing.stages import StagedContract

ENDS_WITHIN_S = 10.0
CALL_DEADLINE_S = 30.0
PRINTED = "printed by a check\n", "and this to the other stream\n"
VARIABLE = "ATROPOS_CHECK_LAUNCHER"


def answer(what: str) -> Any:
    """Answer the contract's questions, in the process that a launcher started."""
    match what:
        case "pid":
            return [os.getpid(), socket.gethostname()]
        case "variable":
            return os.environ.get(VARIABLE)
        case "print":
            for stream, text in ((sys.stdout, PRINTED[0]), (sys.stderr, PRINTED[1])):
                stream.write(text)
                stream.flush()
        case "leave behind":
            return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]).pid
        case "exit":
            os._exit(7)
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
    return None


class LauncherContract(StagedContract):
    """Checks one launcher with processes that answer a few questions."""

    beside_rollouts = False  # a run starts its processes before them
    made: Launcher
    stages = {  # noqa: RUF012 - ClassVar of the base
        "machines": ("at least one, with CPU cores", "machines() says what there is, once it is open."),
        "starts": (
            "a separate process, which answers, with the variables that it was given",
            "start() gives a process whose `connection` its program answers on, with `environment` besides the machine's own.",
        ),
        "logs": ("both streams, as they come", "Append what the process prints to `log` while it runs."),
        "at once": ("several roles at the same time", "Roles do not wait for each other, and each has its own connection."),
        "ends": (
            "an exit code and a signal are told apart, in words",
            'ended() is None while it runs, then "ended with exit code 7" or "was killed by SIGKILL".',
        ),
        "kills": (
            "at once, with what it started",
            "kill() and terminate() reach the process's group; ended() says so soon after, and nothing of it is left.",
        ),
        "closes what runs": ("close() ends its processes", "close() ends what is still there."),
    }  # fmt: skip

    async def open(self) -> Sequence[str]:
        """Also start a first process, without which there is nothing to check."""
        await super().open()
        await self.made.check(["check"])
        self.first = await self._start("check", variable="given")
        return []

    async def check_machines(self) -> Sequence[str]:
        machines = await self.made.machines()
        return [] if any(one.cpus > 0 for one in machines) else [f"machines() gave {machines!r:.200}"]

    async def check_starts(self) -> Sequence[str]:
        pid, host = await self._ask(self.first, "pid")
        found = await self._ask(self.first, "variable")
        wrong = (
            [f"it ran in this process (pid {pid} of {host})"]
            if (pid, host) == (os.getpid(), socket.gethostname())
            else []
        )
        return [
            *wrong,
            *([] if found == "given" else [f"a variable that it was given is {found!r:.40} there, not 'given'"]),
        ]

    async def check_logs(self) -> Sequence[str]:
        await self._ask(self.first, "print")
        log = self.first.log
        arrived = await _soon(lambda: all(text in _text(log) for text in PRINTED))
        return [] if arrived else [f"within {ENDS_WITHIN_S:g} s its log had {_text(log)[-200:]!r}"]

    async def check_ends(self) -> Sequence[str]:
        wrong = []
        for what, wanted in (("exit", "ended with exit code 7"), ("kill", "was killed by SIGKILL")):
            child = await self._start("check")
            if (early := child.process.ended()) is not None:
                wrong.append(f"while it runs, ended() gives {early!r}")
            with suppress(AtroposError):
                await self._ask(child, what)
            await _soon(lambda: child.process.ended() is not None)  # noqa: B023 - called at once
            if not (how := child.process.ended() or "").startswith(wanted):
                wrong.append(f"ended() gave {how!r}, and should give {wanted!r}")
            await child.close()
        return wrong

    async def check_kills(self) -> Sequence[str]:
        wrong = []
        for name in ("kill", "terminate"):
            child = await self._start("check")
            left = await self._ask(child, "leave behind")
            getattr(child.process, name)()
            if not await _soon(lambda: child.process.ended() is not None):  # noqa: B023 - called at once
                wrong.append(f"{name}(): it runs on after {ENDS_WITHIN_S:g} s")
            elif child.process.pid is not None and not await _soon(lambda: not _runs(left)):  # noqa: B023
                wrong.append(f"{name}(): what it had started runs on")
            await child.kill()
        return wrong

    async def check_at_once(self) -> Sequence[str]:
        children = [self.first, *await asyncio.gather(self._start("check-1"), self._start("check-2"))]
        pids = [tuple(await self._ask(child, "pid")) for child in children]
        await asyncio.gather(*(child.close() for child in children))
        return [] if len(set(pids)) == len(pids) else [f"three roles ran in {pids}"]

    async def check_closes_what_runs(self) -> Sequence[str]:
        other: Launcher = await self.opened()
        child = await self._start("check", launcher=other)
        try:
            await other.close()
            ended = await _soon(lambda: child.process.ended() is not None)
        finally:
            await child.kill()
        return [] if ended else [f"a process ran on for {ENDS_WITHIN_S:g} s after close()"]

    async def _start(self, role: str, *, variable: str = "", launcher: Launcher | None = None) -> Child:
        log = self.subject.context.directory / "logs" / f"{role}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        return await Child.start(
            role,
            {"kind": "function", "name": "atropos_testing.launchers:answer"},
            log,
            threads=1,
            environment={VARIABLE: variable} if variable else {},
            launcher=launcher or self.made,
        )

    async def _ask(self, child: Child, what: str) -> Any:
        return await child.peer.call("call", what, deadline_s=CALL_DEADLINE_S)


async def _soon(holds: Callable[[], bool]) -> bool:
    until = time.monotonic() + ENDS_WITHIN_S
    while not holds():
        if time.monotonic() > until:
            return False
        await asyncio.sleep(0.02)
    return True


def _runs(pid: object) -> bool:
    """True if a process of this machine runs, and is not just a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def _text(log: Path) -> str:
    return log.read_text(errors="replace") if log.exists() else ""

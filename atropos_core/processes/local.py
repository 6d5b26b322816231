"""The launcher `local`: processes of this machine, each with one end of a socket pair."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from atropos_core.launchers import Launcher, Machine, StartedProcess


class LocalProcess(StartedProcess):
    """A child of this process. It leads its own process group, so that a Ctrl-C in the terminal reaches only the supervisor."""

    def __init__(self, popen: subprocess.Popen[bytes], connection: socket.socket) -> None:
        self.popen = popen
        self.pid: int = popen.pid
        self.named = f"pid {popen.pid}"
        self.connection = connection

    def ended(self) -> str | None:
        """Return how it ended. The processes that it started are ended first, while the group's id cannot be reused because it has
        not been waited for. They get SIGTERM, which a shared-memory tracker survives long enough to clean up."""
        unwaited = os.WEXITED | os.WNOHANG | os.WNOWAIT
        if self.popen.returncode is None:
            if os.waitid(os.P_PID, self.pid, unwaited) is None:
                return None  # without poll(), which could reap it now, with its group still running
            with suppress(ProcessLookupError):  # it ended before it had its own group
                os.killpg(self.pid, signal.SIGTERM)
        code = self.popen.poll()
        return None if code is None else how_ended(code)

    def terminate(self) -> None:
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        self._signal(signal.SIGKILL)

    def _signal(self, number: signal.Signals) -> None:
        if self.ended() is not None:
            return
        try:
            os.killpg(self.pid, number)
        except ProcessLookupError:  # it does not have its own group yet
            os.kill(self.pid, number)


class LocalLauncher(Launcher):
    """Starts processes on this machine."""

    def __init__(self) -> None:
        self._started: list[LocalProcess] = []

    async def machines(self) -> Sequence[Machine]:
        return [Machine(socket.gethostname(), len(os.sched_getaffinity(0)))]

    async def start(self, role: str, program: str, environment: Mapping[str, str], log: Path) -> LocalProcess:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        with theirs, log.open("ab") as output:
            popen = subprocess.Popen(  # noqa: ASYNC220 - a fork takes a millisecond; asyncio's own would wait for its pipes
                [sys.executable, "-m", program, str(theirs.fileno()), role],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                env={**os.environ, **environment},
            )
        self._started = [*(one for one in self._started if one.ended() is None), LocalProcess(popen, ours)]
        return self._started[-1]

    async def close(self) -> None:
        for one in self._started:
            one.kill()


def how_ended(code: int) -> str:
    """Describe an exit code; negative: the signal."""
    if code >= 0:
        return f"ended with exit code {code}"
    memory = " (the kernel does that when memory runs out)" if code == -signal.SIGKILL else ""
    return f"was killed by {signal.Signals(-code).name}{memory}"

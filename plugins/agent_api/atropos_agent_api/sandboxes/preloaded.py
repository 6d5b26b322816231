"""The sandbox `process` for one Python function that a process imports once; each monitor is a fork of that process.

So an episode begins in hundredths of a second, whatever the function's modules take to import. It protects as `process` does: a
monitor, the limits, separate directories, and the user's rights.
"""

from __future__ import annotations

import asyncio
import json
import os
import select
import signal
import socket
import subprocess
import sys
from pathlib import Path

from atropos_agent_api.sandboxes.monitored import MonitorProcess
from atropos_agent_api.sandboxes.process import ProcessSandbox
from atropos_core import console
from atropos_core.errors import ConfigError, SandboxError
from atropos_core.processes.child import tail_of_log

IMPORT_DEADLINE_S = 300.0
ANSWER_DEADLINE_S = 30.0  # for a fork


class PreloadedSandbox(ProcessSandbox):
    """`where` and `name`: the function's module or file, and its name. `here`: a folder on its sys.path."""

    def __init__(self, where: str, name: str, here: Path, log: Path) -> None:
        super().__init__()
        self._function = (where, name)
        self._here = here
        self._log = log
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._forking = asyncio.Lock()

    async def open(self) -> None:
        """Import the function. Raises ConfigError with the import's error."""
        await super().open()
        await self._begin()

    async def start_monitor(self, theirs: socket.socket, name: str) -> MonitorProcess:
        async with self._forking:
            if self._process is None or self._process.poll() is not None:
                await self._begin()
            return await asyncio.to_thread(self._fork, theirs)

    async def close(self) -> None:
        await super().close()
        await asyncio.to_thread(self._end)

    async def _begin(self) -> None:
        self._end()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs, self._log.open("ab") as log:
            self._process = subprocess.Popen(  # noqa: ASYNC220 - as for other children: a fork takes a millisecond
                [sys.executable, "-m", "atropos_agent_api.sandboxes.preloader", str(theirs.fileno()), *self._function],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                env={**os.environ, "PYTHONPATH": os.pathsep.join([str(self._here), *filter(None, sys.path)])},
            )
        self._socket = ours
        ours.settimeout(IMPORT_DEADLINE_S)
        said = await asyncio.to_thread(self._hear)
        if "error" in said:
            raise ConfigError(f"the function {':'.join(self._function)!r} could not be imported: {said['error']}")
        if "threads" in said:
            console.warn(
                f"importing {':'.join(self._function)!r} started threads ({said['threads']}), which a fork does not have: their work "
                "is not done in an episode, and code that waits for them waits forever. Start them in the function, or use command."
            )
        ours.settimeout(ANSWER_DEADLINE_S)

    def _hear(self) -> dict[str, str]:
        assert self._socket is not None, "it has begun"
        try:
            data = self._socket.recv(1 << 16)
        except TimeoutError:
            return {"error": f"it took longer than {IMPORT_DEADLINE_S:g} s"}
        found: dict[str, str] = (
            json.loads(data) if data else {"error": f"it ended the process.\n{tail_of_log(self._log)}"}
        )
        return found

    def _fork(self, theirs: socket.socket) -> MonitorProcess:
        assert self._socket is not None, "it has begun"
        try:
            socket.send_fds(self._socket, [b"fork"], [theirs.fileno()])
            data, descriptors, _, _ = socket.recv_fds(self._socket, 64, 1)
        except OSError as error:
            raise SandboxError(f"the process that forks the agent's function gave no answer: {error}") from error
        if not descriptors:
            raise SandboxError(f"the process that forks the agent's function has ended.\n{tail_of_log(self._log)}")
        return ForkedMonitor(int(data), descriptors[0])

    def _end(self) -> None:
        if self._socket is not None:
            self._socket.close()
        if self._process is not None:
            try:
                self._process.wait(2.0)
            except subprocess.TimeoutExpired:
                os.killpg(self._process.pid, signal.SIGKILL)
                self._process.wait()
        self._socket = self._process = None


class ForkedMonitor:
    """A monitor that is not a child of this process."""

    def __init__(self, pid: int, descriptor: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._descriptor = descriptor  # of pidfd_open: readable once it has ended

    def poll(self) -> int | None:
        """0 once it has ended; only its parent learns the real code."""
        if self.returncode is None and select.select([self._descriptor], [], [], 0)[0]:
            os.close(self._descriptor)
            self.returncode = 0
        return self.returncode

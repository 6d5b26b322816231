"""A Ray actor that holds one process of a run. Of the run's data only the process's output passes through it."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Mapping

from ray.util import get_node_ip_address

READ_BYTES = 1 << 16


class Holder:
    """One process on this machine, in a separate process group. It ends with this actor: `child_main` has the kernel see to that."""

    def __init__(self) -> None:
        self._process: asyncio.subprocess.Process

    async def start(self, program: str, role: str, address: str, environment: Mapping[str, str]) -> tuple[int, str]:
        """Start it. Returns its process id and the address of this machine."""
        self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            program,
            address,
            role,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,
            env={**os.environ, **environment},
        )
        return self._process.pid, get_node_ip_address()

    async def output(self) -> bytes:
        """The next output; empty once the process has ended, and then no process of its group is left."""
        assert self._process.stdout is not None, "it was started with a pipe"
        ended = asyncio.ensure_future(self._process.wait())
        reading = asyncio.ensure_future(self._process.stdout.read(READ_BYTES))
        await asyncio.wait({ended, reading}, return_when=asyncio.FIRST_COMPLETED)
        if not reading.done():  # a process that it started may still hold its streams
            self.send(signal.SIGTERM)
            await asyncio.wait({reading}, timeout=1.0)
            self.send(signal.SIGKILL)
        ended.cancel()
        return await reading

    async def code(self) -> int:
        """The exit code, once it has ended; negative: the signal."""
        return await self._process.wait()

    def send(self, number: int) -> None:
        """Send a signal to its process group, if any process is left."""
        try:
            os.killpg(self._process.pid, number)
        except ProcessLookupError:
            pass

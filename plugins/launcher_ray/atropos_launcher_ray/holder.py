"""What runs in a Ray actor: it holds one process of a run. Nothing of the run's data passes through it, but for what the process prints."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Mapping

from ray.util import get_node_ip_address

READ_BYTES = 1 << 16


class Holder:
    """One process on this machine, in a process group of its own. It ends with this actor: `child_main` has the kernel see to that."""

    def __init__(self) -> None:
        self._process: asyncio.subprocess.Process

    async def start(self, program: str, role: str, address: str, environment: Mapping[str, str]) -> tuple[int, str]:
        """Its process id, and the address of this machine."""
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
        """What it prints next; empty once it has ended, and then no process of its group is left."""
        assert self._process.stdout is not None, "it was started with a pipe"
        ended = asyncio.ensure_future(self._process.wait())
        reading = asyncio.ensure_future(self._process.stdout.read(READ_BYTES))
        await asyncio.wait({ended, reading}, return_when=asyncio.FIRST_COMPLETED)
        if not reading.done():  # what it started may have its streams still
            self.send(signal.SIGTERM)
            await asyncio.wait({reading}, timeout=1.0)
            self.send(signal.SIGKILL)
        ended.cancel()
        return await reading

    async def code(self) -> int:
        """Its exit code, once it has ended; negative: the signal."""
        return await self._process.wait()

    def send(self, number: int) -> None:
        """A signal to its process group, if there is one left."""
        try:
            os.killpg(self._process.pid, number)
        except ProcessLookupError:
            pass

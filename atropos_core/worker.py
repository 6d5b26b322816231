"""A plain function in a process of its own, for what is heavy on the CPU or may never return."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from atropos_core.errors import DeadlineExceeded
from atropos_core.hosting import Child


class Worker:
    """Calls `"pkg.mod:function"` in a child process, one call at a time; the child starts with the first call.

    A call that passes its deadline, or is cancelled, ends the process, whatever it was computing; the next call gets a
    new one.
    Arguments and results are what `atropos_core.codec` can carry.
    """

    def __init__(self, function: str, log: Path = Path("/dev/null")) -> None:
        self._function = function
        self._log = log
        self._child: Child | None = None
        self._turn = asyncio.Lock()

    async def call(self, *arguments: Any, deadline_s: float) -> Any:
        """What the function returns. Raises DeadlineExceeded, ProcessDied, or what the function raised."""
        async with self._turn:
            if self._child is not None and self._child.peer.lost.is_set():
                await self._end()
            if self._child is None:
                build = {"kind": "function", "name": self._function}
                self._child = await Child.start(f"worker of {self._function}", build, self._log, threads=1)
            try:
                return await self._child.peer.call("call", *arguments, deadline_s=deadline_s)
            except (DeadlineExceeded, asyncio.CancelledError):
                await self._end()
                raise

    async def close(self) -> None:
        await self._end()

    async def _end(self) -> None:
        child, self._child = self._child, None
        if child is not None:
            await child.kill()

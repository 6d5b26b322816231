"""A child process for calls that are heavy on the CPU or may never return. If one hangs, the process is ended and replaced."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from atropos_core.errors import DeadlineExceeded
from atropos_core.processes.child import Child


class ReplaceableChild:
    """Answers one call at a time, so that ending the process cannot fail another call. A call that passes its deadline, or is
    cancelled, ends the process. The next call gets a new one, also if the code there, or the kernel, has ended it."""

    def __init__(self, start: Callable[[], Awaitable[Child]]) -> None:
        self._start = start
        self._child: Child | None = None
        self._turn = asyncio.Lock()

    async def open(self) -> Child:
        """Return the process, started unless it runs. Raises what building its component raises."""
        if self._child is not None and self._child.peer.lost.is_set():
            await self._end()
        if self._child is None:
            self._child = await self._start()
        return self._child

    async def call(self, method: str, *arguments: Any, deadline_s: float) -> Any:
        """Call a method in the process. Raises DeadlineExceeded, ProcessDied, or what was raised there."""
        async with self._turn:
            child = await self.open()
            try:
                return await child.peer.call(method, *arguments, deadline_s=deadline_s)
            except (DeadlineExceeded, asyncio.CancelledError):  # the latter: the caller's own deadline came first
                await self._end()
                raise

    async def close(self) -> None:
        """End the process: at once if it is busy with a call, which it may never finish."""
        if self._turn.locked():
            await self._end()
        child, self._child = self._child, None
        if child is not None:
            await child.close()

    async def _end(self) -> None:
        child, self._child = self._child, None
        if child is not None:
            await child.kill()

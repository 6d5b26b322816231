"""Run a source in a separate thread with its own event loop, because a training step blocks SkyRL's loop.

During a step, a session of the trajectory API must still be renewed, and workers connect and leave.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Collection, Coroutine, Mapping, Sequence
from typing import Any, TypeVar

from atropos_adapter_skyrl.source import GroupRequest, GroupResult, GroupSource

T = TypeVar("T")
STEP_DEADLINE_S = 60.0


class Aside(GroupSource):
    """A source that passes every call to `inner` in the other thread, and raises its errors here."""

    def __init__(self, inner: GroupSource) -> None:
        self.inner = inner
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="atropos-source", daemon=True)

    async def open(self) -> None:
        self._thread.start()
        await self._there(self.inner.open())

    async def fetch(
        self, requests: Sequence[GroupRequest], params: Mapping[str, Any], *, step_wise: bool
    ) -> list[GroupResult]:
        return await self._there(self.inner.fetch(requests, params, step_wise=step_wise))

    async def set_version(self, version: int) -> None:
        await super().set_version(version)
        await self._there(self.inner.set_version(version))

    async def announce(self, version: int) -> None:
        await self._there(self.inner.announce(version))

    def step_ended(self, saved: bool, draws: Collection[int] | None = None) -> bool:
        async def ended() -> bool:
            return self.inner.step_ended(saved, draws)

        return asyncio.run_coroutine_threadsafe(ended(), self._loop).result(STEP_DEADLINE_S)

    async def close(self) -> None:
        if not self._thread.is_alive():
            return
        try:
            await self._there(self.inner.close())
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            await asyncio.to_thread(self._thread.join)
            self._loop.close()

    async def _there(self, call: Coroutine[Any, Any, T]) -> T:
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(call, self._loop))

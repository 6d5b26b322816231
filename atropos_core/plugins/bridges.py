"""The base of bridges whose engines have their own copy of the weights and get new ones after the trainer has written them."""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from atropos_core.errors import FitError
from atropos_core.guards.endings import add_notes
from atropos_core.interfaces import Bridge, Endpoint, Engine, Publication
from atropos_core.plugins.provider import RunContext

T = TypeVar("T")


class PublishingBridge(Bridge):
    """Engines keep sampling while the optimizer writes. Any error leaves all of them paused."""

    def __init__(self, context: RunContext, every: int = 1) -> None:
        """`every`: publish the versions that it divides. Raises FitError if what is sampled in between would be too stale to train."""
        if context.max_staleness < every - 1:
            raise FitError(
                f"bridge.every = {every} lets the engines fall {every - 1} versions behind, and"
                f" training.max_staleness = {context.max_staleness} would throw away what they sample then.",
                remedy=f"Set training.max_staleness={every - 1}, or bridge.every={context.max_staleness + 1}.",
            )
        self._every = every
        self._has_published = False
        self._trainer: Endpoint
        self._engines: Sequence[Engine] = ()  # set by `connect`, as the trainer is

    @asynccontextmanager
    async def writing(self, version: int) -> AsyncIterator[None]:
        """Publish the first version after `connect`, whatever its number: the trainer may have resumed from a checkpoint, while the
        engines have the base model. Then publish each version that `every` divides."""
        async with self._paused_by_errors():
            yield
            if not self._has_published or version % self._every == 0:
                await self._publish_now(version)
            else:
                self.published = None

    async def publish(self, version: int) -> None:
        async with self._paused_by_errors():
            await self._publish_now(version)

    @abstractmethod
    async def _publish(self, version: int) -> Publication:
        """Bring every engine to the trainer's present weights, as `version`."""

    async def _publish_now(self, version: int) -> None:
        self.published = await self._publish(version)
        self._has_published = True

    @asynccontextmanager
    async def _paused_by_errors(self) -> AsyncIterator[None]:
        try:
            yield
        except BaseException as error:
            paused = await asyncio.gather(*(engine.pause() for engine in self._engines), return_exceptions=True)
            add_notes(error, paused, "nor could an engine be paused")
            raise


async def all_or_none(calls: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """Return all results. The first error cancels the other calls, and is raised when they have ended."""
    tasks = [asyncio.ensure_future(call) for call in calls]
    try:
        return await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise

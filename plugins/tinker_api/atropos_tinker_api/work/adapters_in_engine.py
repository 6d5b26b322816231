"""The adapters in the engine's memory: those of the samplers that were used last."""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from atropos_core.stepwise import AdapterEngine
from atropos_tinker_api.state.samplers import Sampler, Samplers


class AdaptersInEngine:
    """At most `most` adapters, unless more are in use at once."""

    def __init__(self, engine: AdapterEngine, samplers: Samplers, most: int) -> None:
        self._engine = engine
        self._samplers = samplers
        self._most = most
        self._there: OrderedDict[str, None] = OrderedDict()  # the last used one last
        self._used: Counter[str] = Counter()
        self._changing = asyncio.Lock()

    @asynccontextmanager
    async def using(self, sampler: Sampler) -> AsyncIterator[str | None]:
        """Yield the name of the sampler's adapter, which stays in the engine during the block; None for the base model. Raises
        Refused if its weights are gone."""
        directory = self._samplers.weights(sampler)
        if directory is None:
            yield None
            return
        name = sampler.id
        self._used[name] += 1
        try:
            async with self._changing:
                if name not in self._there:
                    await self._make_room()
                    await self._engine.add_adapter(directory, name)
                    self._there[name] = None
                self._there.move_to_end(name)
            yield name
        finally:
            self._used[name] -= 1
            if not self._used[name]:
                del self._used[name]

    async def _make_room(self) -> None:
        for name in list(self._there):
            if len(self._there) < self._most:
                return
            if not self._used[name]:
                del self._there[name]
                await self._engine.remove_adapter(name)

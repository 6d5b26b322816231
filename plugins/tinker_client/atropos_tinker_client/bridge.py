"""The bridge `tinker`: the server saves the trainer's weights for sampling, and the engines learn the path. No weights travel here."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Literal

from atropos_core.interfaces import Endpoint, Engine, Publication
from atropos_core.plugins.bridges import PublishingBridge

if TYPE_CHECKING:
    from atropos_core.plugins.provider import RunContext
    from atropos_tinker_client.config import TinkerBridgeOptions


class TinkerBridge(PublishingBridge):
    def __init__(self, options: TinkerBridgeOptions, context: RunContext) -> None:
        super().__init__(context, options.every)
        self._options = options

    def extensions(self) -> Mapping[Literal["engine", "trainer"], str]:
        return {
            "trainer": "atropos_tinker_client.trainer_extension:TrainerExtension",
            "engine": "atropos_tinker_client.engine_extension:EngineExtension",
        }

    async def connect(self, trainer: Endpoint, engines: Sequence[Engine]) -> None:
        """Publish the adapter that the trainer begins with, as version 0: an engine that cannot use it fails now."""
        self._trainer, self._engines = trainer, engines
        await self._publish(0)

    async def _publish(self, version: int) -> Publication:
        began, deadline_s = time.perf_counter(), self._options.deadline_s
        path, _ = await self._trainer.call("save", version, self._options.ttl_hours, deadline_s=deadline_s)
        await asyncio.gather(
            *(engine.endpoint.call("sample_from", path, version, deadline_s=deadline_s) for engine in self._engines)
        )
        await asyncio.gather(*(engine.resume(version) for engine in self._engines))
        return Publication(version, time.perf_counter() - began, bytes_copied=0)

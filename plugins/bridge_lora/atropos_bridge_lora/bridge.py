"""The supervisor's part: it has the trainer save an adapter and the engines load it, and removes adapters no longer needed.

Each version has its own directory, which never changes once it has its name: an engine may read it again as long as it
exists. The engines do not wait for the optimiser: while it writes, they continue to sample with the previous adapter.
"""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

from atropos_bridge_lora.config import LoraBridgeOptions
from atropos_core.interfaces import Endpoint, Engine, Publication
from atropos_core.plugins.bridges import PublishingBridge
from atropos_core.plugins.provider import RunContext


class LoraBridge(PublishingBridge):
    """`adapters/v000012` in the run directory holds the adapter of version 12."""

    def __init__(self, options: LoraBridgeOptions, context: RunContext) -> None:
        super().__init__(context)
        self._deadline_s = options.save_deadline_s
        self._directory = context.directory / "adapters"
        self._keep = options.keep
        self._published: list[Path] = []  # oldest first

    def extensions(self) -> Mapping[Literal["engine", "trainer"], str]:
        return {"trainer": "atropos_bridge_lora.trainer_extension:TrainerExtension"}

    async def connect(self, trainer: Endpoint, engines: Sequence[Engine]) -> None:
        """Give the engines the adapter that the trainer begins with, as version 0. It changes nothing yet, but shows that
        they accept it, and no request is ever without an adapter (vLLM's LoRA kernels for CPUs take -1, no adapter, for
        the last slot's). Raises WeightsMismatch if the trainer does not train an adapter, or an engine refuses it."""
        self._trainer, self._engines = trainer, engines
        await trainer.call("check", deadline_s=self._deadline_s)
        shutil.rmtree(self._directory, ignore_errors=True)  # what a run that was killed has left
        self._directory.mkdir(parents=True)
        lasting = [engine for engine in engines if engine.outlives_run]
        await asyncio.gather(*(engine.resume(0) for engine in lasting))  # a run that was killed may have left it paused
        await self._publish(0)

    async def close(self) -> None:
        await asyncio.to_thread(shutil.rmtree, self._directory, ignore_errors=True)

    async def _publish(self, version: int) -> Publication:
        began = time.perf_counter()
        directory = self._directory / f"v{version:06d}"
        size, _ = await self._trainer.call("save", str(directory), deadline_s=self._deadline_s)
        await asyncio.gather(*(engine.load_adapter(directory, version) for engine in self._engines))
        self._published = [*(old for old in self._published if old != directory), directory]
        old, self._published = self._published[: -self._keep], self._published[-self._keep :]
        for unused in old:
            await asyncio.to_thread(shutil.rmtree, unused)
        return Publication(version, time.perf_counter() - began, bytes_copied=size, bytes_on_disk=size)

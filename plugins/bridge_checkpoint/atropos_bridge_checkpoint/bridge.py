"""The supervisor's part: it has the trainer save a checkpoint and the paused engines load it, and removes older ones.

The engines continue to sample with the old weights while the optimiser writes and while the checkpoint is saved; they
stop only to load. A checkpoint is removed once all engines have loaded a later one, so that one always exists.
"""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

from atropos_bridge_checkpoint.config import CheckpointBridgeOptions
from atropos_core.interfaces import Endpoint, Engine, Publication
from atropos_core.plugins.bridges import PublishingBridge
from atropos_core.plugins.provider import RunContext


class CheckpointBridge(PublishingBridge):
    """`published/v000012` in the run directory is the model of version 12."""

    def __init__(self, options: CheckpointBridgeOptions, context: RunContext) -> None:
        super().__init__(context, options.every)
        self._options = options
        self._model = context.model
        self._directory = context.directory / "published"
        self._published: list[Path] = []  # by this connection, oldest first

    def extensions(self) -> Mapping[Literal["engine", "trainer"], str]:
        return {"trainer": "atropos_bridge_checkpoint.trainer_extension:TrainerExtension"}

    async def connect(self, trainer: Endpoint, engines: Sequence[Engine]) -> None:
        """Do nothing for engines of this run: they have loaded the trainer's model directory. An engine that outlives runs
        may hold another run's weights, so it gets the trainer's as version 0."""
        self._trainer, self._engines = trainer, engines
        self._directory.mkdir(parents=True, exist_ok=True)
        for partial in self._directory.glob(".*.partial"):  # what a run that was killed has left
            await asyncio.to_thread(shutil.rmtree, partial)
        if lasting := [engine for engine in engines if engine.outlives_run]:
            await self._send(0, lasting)  # its directory goes with the first that is published

    async def close(self) -> None:
        """Remove the saved models: they were for the engines, and the run's checkpoints hold what it has learned."""
        await asyncio.to_thread(shutil.rmtree, self._directory, ignore_errors=True)

    async def _publish(self, version: int) -> Publication:
        began = time.perf_counter()
        directory, size = await self._send(version, self._engines)
        self._published = [*(old for old in self._published if old != directory), directory][-self._options.keep :]
        for old in set(self._directory.iterdir()) - set(self._published):  # those of a killed run among them
            await asyncio.to_thread(shutil.rmtree, old)
        return Publication(version, time.perf_counter() - began, bytes_copied=size, bytes_on_disk=size)

    async def _send(self, version: int, engines: Sequence[Engine]) -> tuple[Path, int]:
        """Have the trainer save and these engines load. Returns the directory and its size in bytes."""
        directory = self._directory / f"v{version:06d}"
        size, _ = await self._trainer.call(
            "save", str(directory), str(self._model), deadline_s=self._options.save_deadline_s
        )
        await asyncio.gather(*(self._reload(engine, directory, version) for engine in engines))
        return directory, size

    async def _reload(self, engine: Engine, directory: Path, version: int) -> None:
        async with engine.paused(version):
            await engine.load_weights(directory)

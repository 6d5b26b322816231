"""The supervisor's part: it passes the manifest and the segment from the engine to the trainer, and keeps them apart in
time. No torch, no weights, and once `connect` returns no descriptor either.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, Literal

from atropos_bridge_ipc.config import IpcOptions
from atropos_core.errors import FitError, WeightsMismatch
from atropos_core.interfaces import Bridge, Endpoint, Engine, Publication
from atropos_core.registry import RunContext


class IpcBridge(Bridge):
    """One engine owns the weights; the trainer's parameters are views of them. Publishing copies nothing."""

    def __init__(self, options: IpcOptions, context: RunContext) -> None:
        self._deadline_s = options.connect_deadline_s
        self._transport = context.transport or "posix_shm"
        self._trainer: Endpoint
        self._engine: Engine

    def agents(self) -> Mapping[Literal["engine", "trainer"], str]:
        return {
            "engine": "atropos_bridge_ipc.agents:EngineAgent",
            "trainer": "atropos_bridge_ipc.agents:TrainerAgent",
        }

    async def connect(self, trainer: Endpoint, engines: Sequence[Engine]) -> None:
        """Move the engine's weights into a segment and have the trainer adopt every tensor of it. Raises FitError for
        more than one engine, WeightsMismatch where the two models differ in anything, or do not share memory."""
        if len(engines) != 1:
            raise FitError(
                f"bridge 'ipc' shares one copy of the weights between the trainer and one engine; this run has {len(engines)} engines.",
                remedy="Run one engine, or use `--bridge checkpoint`.",
            )
        self._trainer, self._engine = trainer, engines[0]
        offer, descriptors = await self._ask(self._engine.endpoint, "export", self._transport)
        try:
            receipt = await self._value(trainer, "adopt", offer, descriptors=descriptors)
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
        if receipt["segment"] != offer["segment"]:
            raise WeightsMismatch(
                f"the trainer has mapped segment {receipt['segment']}, and the engine exported {offer['segment']}."
            )
        await self._agree(self._engine.endpoint, trainer, "the engine", "the trainer", slot=0)
        await self._agree(trainer, self._engine.endpoint, "the trainer", "the engine", slot=1)

    @asynccontextmanager
    async def writing(self, version: int) -> AsyncIterator[None]:
        began = time.perf_counter()
        await self._engine.pause()
        seconds = time.perf_counter() - began
        yield
        began = time.perf_counter()
        if self._transport == "cuda_ipc":  # kernels that still write would race with the engine's first reads
            await self._value(self._trainer, "finish_writes")
        await self._engine.resume(version)
        self.published = Publication(version, seconds + time.perf_counter() - began, bytes_copied=0)

    async def _agree(self, writer: Endpoint, reader: Endpoint, by: str, of: str, *, slot: int) -> None:
        written = secrets.randbits(62)
        await self._value(writer, "write_sentinel", slot, written)
        found = await self._value(reader, "read_sentinel", slot)
        if found != written:
            raise WeightsMismatch(
                f"{by} wrote {written:#x} into the shared segment, and {of} reads {found:#x} there: they do not share memory."
            )

    async def _value(self, endpoint: Endpoint, method: str, *arguments: Any, descriptors: Sequence[int] = ()) -> Any:
        value, given = await self._ask(endpoint, method, *arguments, descriptors=descriptors)
        for descriptor in given:
            os.close(descriptor)
        return value

    async def _ask(
        self, endpoint: Endpoint, method: str, *arguments: Any, descriptors: Sequence[int] = ()
    ) -> tuple[Any, list[int]]:
        return await endpoint.ask(method, *arguments, descriptors=descriptors, deadline_s=self._deadline_s)

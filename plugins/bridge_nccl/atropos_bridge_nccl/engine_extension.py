"""The bridge's extension in the engine's process: it receives into the engine's own tensors, or has the workers of a server do so."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from atropos_core.interfaces import WeightHolder, WeightServer
from atropos_torch_models.tensors import describe, tensors_of

if TYPE_CHECKING:
    from atropos_bridge_nccl.group import Group

SLACK_S = 5.0  # of a server's answer over its workers' deadlines


def extension_for(engine: Any) -> Any:
    """Return a ServerExtension if a server holds the engine's weights, else an EngineExtension."""
    return ServerExtension(engine) if hasattr(engine, "transfer_weights") else EngineExtension(engine)


class EngineExtension:
    """The engine is paused while it receives. A broadcast that breaks off leaves it with part of the new weights: it stays paused, and
    ends with the run."""

    def __init__(self, holder: WeightHolder) -> None:
        self._holder = holder
        self._group: Group

    async def open(self) -> dict[str, Any]:
        """Return the engine's tensors, and the kind of device of each process that will receive."""
        tensors = tensors_of(self._holder.model)
        self._device = next(iter(tensors.values())).device
        return {"tensors": [list(one) for one in describe(tensors)], "devices": [self._device.type]}

    async def join(self, where: Mapping[str, Any], rank: int) -> None:
        from atropos_bridge_nccl.group import Group

        self._group = await asyncio.to_thread(Group, where, rank, self._device)

    async def receive(self, version: int, tensors: Sequence[Sequence[Any]]) -> None:
        await asyncio.to_thread(self._receive, version)

    def _receive(self, version: int) -> None:
        self._group.expect(version, "sends")
        for tensor in tensors_of(self._holder.model).values():
            into = tensor.to(self._group.device).contiguous()  # the same tensor if it is contiguous and on that device
            self._group.broadcast(into)
            if into.data_ptr() != tensor.data_ptr():
                tensor.copy_(into)


class ServerExtension:
    """vLLM's weight-transfer routes: its workers load what arrives by their own loader (`vllm.worker`)."""

    def __init__(self, server: WeightServer) -> None:
        self._server = server
        self._deadline_s: float

    async def open(self) -> dict[str, Any]:
        kinds = [device.partition(":")[0] for device in self._server.worker_devices]
        return {"tensors": None, "devices": kinds}

    async def join(self, where: Mapping[str, Any], rank: int) -> None:
        self._deadline_s = where["deadline_s"] + SLACK_S
        await self._server.transfer_weights("init", {"where": dict(where), "first_rank": rank}, self._deadline_s)

    async def receive(self, version: int, tensors: Sequence[Sequence[Any]]) -> None:
        await self._server.transfer_weights("start", {}, self._deadline_s)
        await self._server.transfer_weights("update", {"version": version, "tensors": tensors}, self._deadline_s)
        await self._server.transfer_weights("finish", {}, self._deadline_s)

"""The bridge's extension in the process of an engine that holds its own weights, which the trainer's model will share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from atropos_bridge_ipc import segment, tensors
from atropos_bridge_ipc.manifest import Manifest, end, place
from atropos_bridge_ipc.sentinels import Sentinels
from atropos_core.interfaces import Transport
from atropos_core.processes.rpc import Reply


class OwnerExtension(Sentinels):
    """The owner's end."""

    async def export(self, transport: Transport, where: Mapping[str, Any] | None = None) -> Reply:
        """Move every distinct parameter and persistent buffer into a new segment. (`where` is for workers of a server,
        which answer in files.)"""
        model: nn.Module = self.holder.model
        described, found = tensors.describe(model)
        device = found[0].device
        del found
        placed = place(described)
        exported = tensors.move(tensors.saved(model), placed, lambda: segment.export(transport, end(placed), device))
        self._flat, self._device = exported.flat, device
        await self.finish_writes()
        self.holder.weights_moved()
        rebuilt = {name: tensors.digest(buffer) for name, buffer in tensors.transient(model).items()}
        manifest = Manifest(len(exported.flat), placed, rebuilt)
        offer = {
            "transport": transport,
            "manifest": manifest.encoded(),
            "handle": exported.handle,
            "segment": exported.identity,
        }
        return Reply(offer, exported.descriptors)

    async def takes_copies(self) -> bool:
        """Return False: nothing in this process loads a copy of the trainer's weights into the model."""
        return False

"""The bridge's code inside the engine's and the trainer's process. Each is given the component that lives there: an
interfaces.WeightHolder.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from atropos_bridge_ipc import segment, tensors
from atropos_bridge_ipc.manifest import PAGE, Manifest, check, check_rebuilt, end, place
from atropos_core.errors import WeightsMismatch
from atropos_core.interfaces import Transport, WeightHolder
from atropos_core.rpc import Reply


class _Agent:
    """What both ends do alike: a sentinel written here must be read there."""

    def __init__(self, holder: WeightHolder) -> None:
        self.holder = holder
        self._flat: torch.Tensor

    async def write_sentinel(self, slot: int, value: int) -> None:
        self._sentinels()[slot] = value
        await self.finish_writes()

    async def read_sentinel(self, slot: int) -> int:
        return int(self._sentinels()[slot])

    async def finish_writes(self) -> None:
        """Return once everything that was written can be read by the other end."""
        if self._flat.is_cuda:
            torch.cuda.synchronize(self._flat.device)

    def _sentinels(self) -> torch.Tensor:
        return self._flat[:PAGE].view(torch.int64)


class EngineAgent(_Agent):
    """The owner's end."""

    async def export(self, transport: Transport) -> Reply:
        """Move every distinct parameter and persistent buffer into a new segment, one by one, so that never more than
        one tensor exists twice. Parameter objects and their ties stay as they are."""
        model: nn.Module = self.holder.model
        described, found = tensors.describe(model)
        placed = place(described)
        exported = segment.export(transport, end(placed), found[0].device)
        self._flat = exported.flat
        every = tensors.saved(model)
        with torch.no_grad():
            for entry, tensor in zip(placed, found, strict=True):
                target = tensors.view(exported.flat, entry)
                target.copy_(tensor)
                for name in entry.names:
                    every[name].data = target
        del found, every, tensor
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


class TrainerAgent(_Agent):
    """The other end: its model becomes views of the owner's segment."""

    async def adopt(self, offer: Mapping[str, Any], descriptors: Sequence[int] = ()) -> dict[str, Any]:
        """Check every tensor, then replace all of them. Raises WeightsMismatch before anything is replaced."""
        manifest = Manifest.decoded(offer["manifest"])
        flat, identity = segment.attach(offer["transport"], offer["handle"], descriptors)
        model: nn.Module = self.holder.model
        described, found = tensors.describe(model)
        check(manifest, described, len(flat))
        rebuild_transient(model, flat.device)
        check_rebuilt(
            manifest.rebuilt, {name: tensors.digest(buffer) for name, buffer in tensors.transient(model).items()}
        )
        theirs = {name: entry for entry in manifest.tensors for name in entry.names}
        for entry, old in zip(described, found, strict=True):
            shared = tensors.view(flat, theirs[entry.name])
            # `.data` cannot go from the meta device to another: one new object takes all the places of the old one.
            new = nn.Parameter(shared, requires_grad=old.requires_grad) if isinstance(old, nn.Parameter) else shared
            for name in entry.names:
                module, leaf = tensors.owners(model, name)
                (module._parameters if isinstance(old, nn.Parameter) else module._buffers)[leaf] = new  # type: ignore[assignment]
        if left := [
            name for name, tensor in {**tensors.saved(model), **tensors.transient(model)}.items() if tensor.is_meta
        ]:
            raise WeightsMismatch(
                f"the trainer's model still has {left[0]!r} on the meta device: it would compute nothing."
            )
        self._flat = flat
        self.holder.weights_moved()
        return {"segment": identity}


def rebuild_transient(model: nn.Module, device: torch.device) -> None:
    """Make the buffers that a skeleton has on the meta device, and that no weights file holds, as the model itself does.
    The parameters must still be on the meta device, or the model would initialise them as well."""
    for module in list(model.modules()):
        lost = [
            leaf
            for leaf in module._non_persistent_buffers_set
            if (buffer := module._buffers[leaf]) is not None and buffer.is_meta
        ]
        if not lost:
            continue
        # Not a number: what the model then fails to set cannot pass for a value.
        for leaf in lost:
            module._buffers[leaf] = _filled(module._buffers[leaf])  # type: ignore[arg-type]
        if not hasattr(model, "_init_weights") or any(not own.is_meta for own in module.parameters(recurse=False)):
            raise WeightsMismatch(
                f"buffer {lost[0]!r} of {type(module).__name__} is on the meta device, and the model has no way to make it anew.",
                remedy="Build the trainer's skeleton with that buffer on a real device.",
            )
        with torch.no_grad():
            model._init_weights(module)  # type: ignore[operator] # transformers' own rule, on the CPU as at loading
        for leaf in lost:
            module._buffers[leaf] = module._buffers[leaf].to(device)  # type: ignore[union-attr]


def _filled(meta: torch.Tensor) -> torch.Tensor:
    return torch.full(meta.shape, float("nan") if meta.is_floating_point() else -1, dtype=meta.dtype, device="cpu")

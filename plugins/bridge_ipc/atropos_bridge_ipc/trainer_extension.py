"""The bridge's extension in the trainer's process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import nn

from atropos_bridge_ipc import copies, file_tensors, rotary, segment, tensors
from atropos_bridge_ipc.copies import Copies
from atropos_bridge_ipc.manifest import Manifest, Tensor, check, check_rebuilt
from atropos_bridge_ipc.sentinels import Sentinels
from atropos_core.errors import FitError, WeightsMismatch
from atropos_core.interfaces import WeightHolder


class TrainerExtension(Sentinels):
    """The other end: its model becomes views of the owner's segment, or keeps its own weights and writes copies."""

    def __init__(self, holder: WeightHolder) -> None:
        super().__init__(holder)
        self._copies: Copies | None = None

    async def wanted(self) -> list[dict[str, Any]]:
        """Every parameter and persistent buffer of the model, as Tensor entries."""
        described, _ = tensors.describe(self.holder.model)
        return [asdict(entry) for entry in described]

    async def adopt(self, offer: Mapping[str, Any], descriptors: Sequence[int] = ()) -> dict[str, Any]:
        """Check every tensor, then replace all of them. Raises WeightsMismatch before anything is replaced. The receipt
        has only `impossible` if this process may not map the segment.

        An offer with `rotary` comes from an engine whose model is not a Hugging Face one. Then every value is compared
        with those in `directory`, the model directory, to prove that its parameters were mapped correctly."""
        manifest = Manifest.decoded(offer["manifest"])
        try:
            flat, identity = segment.attach(offer["transport"], offer["handle"], descriptors)
        except FitError as error:
            return {"impossible": str(error)}
        model: nn.Module = self.holder.model
        described, found = tensors.describe(model)
        check(manifest, described, len(flat))
        rebuild_transient(model, flat.device)
        theirs = {name: entry for entry in manifest.tensors for name in entry.names}
        if "rotary" in offer:
            rotary.check_fresh(model)
            rotary.check(model, offer["rotary"])
            for entry, value in file_tensors.each(model, Path(offer["directory"]), described):
                file_tensors.check_value(entry.name, tensors.view(flat, theirs[entry.name]), value)
        else:
            check_rebuilt(
                manifest.rebuilt, {name: tensors.digest(buffer) for name, buffer in tensors.transient(model).items()}
            )
        for entry, old in zip(described, found, strict=True):
            replace(model, entry, old, tensors.view(flat, theirs[entry.name]))
        self._complete()
        self._flat, self._device = flat, flat.device
        return {"segment": identity}

    async def load(self, directory: str) -> None:
        """Load a model directory into a model that was meant to share the engine's weights."""
        model: nn.Module = self.holder.model
        device = next((buffer.device for buffer in model.buffers() if not buffer.is_meta), torch.device("cpu"))
        rebuild_transient(model, device)
        described, found = tensors.describe(model)
        old = {entry.name: tensor for entry, tensor in zip(described, found, strict=True)}
        for entry, value in file_tensors.each(model, Path(directory), described):
            dtype = getattr(torch, entry.dtype)
            replace(model, entry, old[entry.name], value.to(device=device, dtype=dtype, copy=True))
        self._complete()

    async def offer_copies(self, path: str, nonce: str, model: str, directory: str) -> list[Any]:
        """Make the memory that copies pass through, and the handle file that locates it. Returns its identity.
        Raises FitError for a model whose parameters an engine would not know by their names."""
        file_tensors.check_names(Path(directory), copies.described(self.holder.model))
        self._copies = Copies(self.holder.model, Path(path), nonce, model)
        self._flat = self._copies.flat
        return self._copies.identity

    async def write_copies(self, slot: int, version: int) -> int:
        """Copy every tensor as it is now. Returns the bytes."""
        if self._copies is None:
            raise WeightsMismatch("the trainer never had a request to keep copies.")
        copied = self._copies.write(self.holder.model)
        self._copies.sentinels()[slot] = version
        return copied

    def _complete(self) -> None:
        model: nn.Module = self.holder.model
        every = {**tensors.saved(model), **tensors.transient(model)}
        if left := [name for name, tensor in every.items() if tensor.is_meta]:
            raise WeightsMismatch(
                f"the trainer's model still has {left[0]!r} on the meta device: it would compute nothing."
            )
        self.holder.weights_moved()


def replace(model: nn.Module, entry: Tensor, old: torch.Tensor, tensor: torch.Tensor) -> None:
    """Replace `old` by `tensor` everywhere. (`.data` cannot move from the meta device to another, so all places get one
    new object.)"""
    new = nn.Parameter(tensor, requires_grad=old.requires_grad) if isinstance(old, nn.Parameter) else tensor
    for name in entry.names:
        module, leaf = tensors.owners(model, name)
        (module._parameters if isinstance(old, nn.Parameter) else module._buffers)[leaf] = new  # type: ignore[assignment]


def rebuild_transient(model: nn.Module, device: torch.device) -> None:
    """Make the buffers that a skeleton has on the meta device and that no weights file holds, by the model's own code.
    The parameters must still be on the meta device, or the model would also initialise them."""
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

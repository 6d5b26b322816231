"""The trainer's weights once more in host memory, under their Hugging Face names, for engines that must copy them."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from atropos_bridge_ipc import handles, segment, tensors
from atropos_bridge_ipc.manifest import PAGE, Manifest, end, place


class Copies:
    """A segment, and the handle file by which an engine's workers find it. The segment ends with its last process; the
    bridge removes the file."""

    def __init__(self, model: nn.Module, path: Path, nonce: str, identity: str) -> None:
        described, _ = tensors.describe(model)
        self._placed = place(described)
        exported = segment.export("posix_shm", end(self._placed), torch.device("cpu"))
        self.flat, self.identity = exported.flat, exported.identity
        content = {
            "manifest": Manifest(len(self.flat), self._placed, {}).encoded(),
            "descriptor": exported.descriptors[0],  # stays open, because the workers open the segment through it
            "segment": exported.identity,
        }
        handles.write(path, nonce, identity, content)

    @torch.no_grad()
    def write(self, model: nn.Module) -> int:
        """Copy every tensor of the model. Returns the bytes."""
        every = tensors.saved(model)
        for entry in self._placed:
            tensors.view(self.flat, entry).copy_(every[entry.name])  # from a GPU this waits for the kernels before
        return sum(entry.nbytes for entry in self._placed)

    def sentinels(self) -> torch.Tensor:
        return self.flat[:PAGE].view(torch.int64)

"""The trainer's weights once more in host memory, named and shaped as in files of weights, for engines that must copy them."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from atropos_bridge_ipc import handles, segment, tensors
from atropos_bridge_ipc.manifest import PAGE, Manifest, Tensor, end, place
from atropos_torch_models.stored_tensors import stored_tensors


def described(model: nn.Module) -> list[Tensor]:
    """Describe each tensor that is copied."""
    shapes = {name: one.contiguous() for name, one in stored_tensors(model, shapes=True)}
    return tensors.describe_tensors(shapes)[0]


class Copies:
    """A segment, and the handle file by which an engine's workers find it. The segment ends with its last process; the
    bridge removes the file."""

    def __init__(self, model: nn.Module, path: Path, nonce: str, identity: str) -> None:
        self._placed = place(described(model))
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
        placed = {entry.name: entry for entry in self._placed}
        for name, tensor in stored_tensors(model):
            tensors.view(self.flat, placed[name]).copy_(tensor)  # from a GPU this waits for the kernels before
        return sum(entry.nbytes for entry in self._placed)

    def sentinels(self) -> torch.Tensor:
        return self.flat[:PAGE].view(torch.int64)

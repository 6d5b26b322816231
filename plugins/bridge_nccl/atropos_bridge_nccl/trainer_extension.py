"""The bridge's code inside the trainer's process: rank 0, which sends."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from atropos_bridge_nccl.group import Group
from atropos_core.errors import WeightsMismatch
from atropos_core.interfaces import WeightHolder
from atropos_core.models.model_size import read
from atropos_torch_models.network import LOOPBACK, listen
from atropos_torch_models.stored_tensors import stored_tensors
from atropos_torch_models.tensors import SAME_MODEL, Described, check_same, describe, tensors_of


class TrainerExtension:
    """If the trainer has several ranks, this is in the first one, which has the whole model."""

    def __init__(self, holder: WeightHolder) -> None:
        self._holder = holder
        self._tensors: Sequence[Sequence[Any]] = ()  # name, dtype and shape of each that is sent, in this order
        self._stored = False  # engines load them as files of weights have them
        self._own: Sequence[Described] = ()  # the model's, when they were agreed on
        self._group: Group

    async def open(self, engines: Sequence[Sequence[Any]] | None, host: str, directory: str) -> dict[str, Any]:
        """Return what will be sent, in the order and dtypes of `engines` if given. Other engines load by name what `directory` has. Listens
        at `host`, an address of this machine; if it is empty, only processes of this machine can connect. Raises WeightsMismatch."""
        self._own = describe(tensors_of(self._holder.model))
        self._stored = engines is None
        ours = describe(dict(stored_tensors(self._holder.model, shapes=True))) if self._stored else self._own
        if engines is not None:
            check_same(engines, ours, "the trainer")
        stored = model.tensors if directory and (model := read(Path(directory))) is not None else {}
        for name, _, shape in ours if stored else ():
            if (found := stored.get(name)) != tuple(shape):
                raise WeightsMismatch(
                    f"{name!r} is {shape} in the trainer, and {list(found or ())} among the weights in {directory}.",
                    remedy=f"{SAME_MODEL} Or use --bridge checkpoint for this one.",
                )
        self._tensors = [list(one) for one in engines or ours]
        self._listening = listen(host or LOOPBACK)
        where = self._listening.getsockname()
        return {"tensors": self._tensors, "host": where[0], "port": where[1], "device": self._device().type}

    async def join(self, where: Mapping[str, Any]) -> None:
        self._group = await asyncio.to_thread(Group, where, 0, self._device(), self._listening)

    async def check(self) -> None:
        """Raises WeightsMismatch, before anything is sent, if the model's tensors have changed since `open`."""
        check_same(self._own, describe(tensors_of(self._holder.model)), "the trainer")

    async def send(self, version: int) -> int:
        """Send all tensors, in the agreed order and dtypes. Returns their size in bytes."""
        return await asyncio.to_thread(self._send, version)

    def _send(self, version: int) -> int:
        size = 0
        self._group.tell(version)
        for tensor, (_, dtype, _) in zip(self._sent(), self._tensors, strict=True):
            sent = tensor.to(self._group.device, getattr(torch, dtype)).contiguous()
            self._group.broadcast(sent)
            size += sent.nbytes
        return size

    def _sent(self) -> Iterator[Tensor]:
        if self._stored:
            yield from (tensor for _, tensor in stored_tensors(self._holder.model))
        else:
            present = tensors_of(self._holder.model)
            yield from (present[name] for name, _, _ in self._tensors)

    def _device(self) -> torch.device:
        """Return the device of the weights, or the GPU of a first rank that keeps its whole copy in host memory."""
        device = next(iter(tensors_of(self._holder.model).values())).device
        return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_initialized() else device

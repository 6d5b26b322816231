"""The ranks of one trainer: how sequences are divided among them, and sums over all.

Every rank holds the whole batch and computes the division for itself, so nothing has to be agreed on. All of them run
equally many passes: under FSDP a pass is collective, and a rank that left one out would leave the others waiting.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as distributed
from numpy.typing import NDArray
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

Indices = NDArray[np.int64]


@dataclass(frozen=True)
class ProcessGroup:
    """One rank's view. Alone, nothing is divided and nothing is sent."""

    rank: int = 0
    size: int = 1

    def passes(self, lengths: Indices, order: Indices, cut: Callable[[Indices], list[Indices]]) -> list[Indices]:
        """This rank's part of `order` (sequence numbers), cut into micro-batches. Empty ones at the end stand for passes
        that only other ranks have work for."""
        if self.size == 1:
            return cut(order)
        each = [cut(share) if len(share) else [] for share in shares(lengths, order, self.size)]
        mine, longest = each[self.rank], max(map(len, each))
        return mine + [np.empty(0, np.int64)] * (longest - len(mine))

    def sum(self, values: Tensor) -> Tensor:
        """Over all ranks, in place."""
        if self.size > 1:
            distributed.all_reduce(values)
        return values

    def sum_array(self, values: NDArray[np.float32]) -> NDArray[np.float32]:
        """Sum an array over ranks, in which each has filled its own sequences and left the rest at zero."""
        return self.sum(torch.from_numpy(values)).numpy()


ALONE = ProcessGroup()


def full(tensor: Tensor) -> Tensor:
    """The whole of a tensor that is divided over ranks; collective. Any other as it is."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def local(tensor: Tensor) -> Tensor:
    """Return this rank's part of the tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def part(parameter: Tensor, whole: Tensor) -> Tensor:
    """This rank's part of a tensor that is shaped like a parameter; nothing is sent."""
    if not isinstance(parameter, DTensor):
        return whole
    whole = whole.to(parameter.device, parameter.dtype)
    return distribute_tensor(whole, parameter.device_mesh, parameter.placements, src_data_rank=None)


def shares(lengths: Indices, order: Indices, size: int) -> list[Indices]:
    """Cut `order` into `size` runs of nearly as many tokens: neighbours stay together, for they may share a prompt."""
    ends = np.cumsum(lengths[order])
    middles = ends - lengths[order] / 2
    total = ends[-1] if len(ends) else 0
    return np.split(order, np.searchsorted(middles, total * np.arange(1, size) / size))

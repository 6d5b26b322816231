"""Tensors as patterns of bits, and digests to compare them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import torch
from torch import Tensor

from atropos_core.errors import WeightsMismatch

INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes of an element


def bits(tensor: Tensor) -> Tensor:
    """View the tensor's own memory as integers [N]. Raises WeightsMismatch if the tensor is not contiguous."""
    if not tensor.is_contiguous():
        raise WeightsMismatch(
            f"a tensor of shape {list(tensor.shape)} is strided in memory, and bridge 'delta' writes into whole ones.",
            remedy="Use --bridge checkpoint for this model.",
        )
    return tensor.view(-1).view(INTEGERS[tensor.element_size()])


def digest(all_bits: Iterable[Tensor]) -> str:
    """BLAKE2b of every bit, in order."""
    found = hashlib.blake2b(digest_size=16)
    for one in all_bits:
        found.update(one.cpu().numpy().data)
    return found.hexdigest()


def named_dtype(name: str) -> torch.dtype:
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise WeightsMismatch(f"there is no dtype {name!r} in this torch.")
    return found

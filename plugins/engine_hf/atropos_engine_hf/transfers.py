"""Copies between host and device. On a GPU each wait for the device costs a step more than its arithmetic does: going there waits for
nothing, and coming back waits once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray


def upload(values: NDArray[Any], device: torch.device) -> torch.Tensor:
    """Return the values on the device. The host does not wait for the copy: torch keeps pinned memory until it has been read."""
    tensor = torch.from_numpy(np.ascontiguousarray(values))
    if device.type == "cuda":
        tensor = tensor.pin_memory()  # a copy from other memory makes the host wait
    return tensor.to(device, non_blocking=True)


def joined(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the bytes of all tensors as one, so that `parts` can fetch them in one copy."""
    return torch.cat([tensor.contiguous().view(-1).view(torch.uint8) for tensor in tensors])


def parts(fetched: NDArray[np.uint8], tensors: Sequence[torch.Tensor]) -> list[NDArray[Any]]:
    """Return what `joined` made of these tensors as arrays of their shapes and dtypes. The tensors' own memory is not read."""
    made, at = [], 0
    for tensor in tensors:
        size = tensor.numel() * tensor.element_size()
        dtype = torch.empty(0, dtype=tensor.dtype).numpy().dtype
        made.append(fetched[at : at + size].view(dtype).reshape(tuple(tensor.shape)))
        at += size
    return made


def download(*tensors: torch.Tensor) -> list[NDArray[Any]]:
    """Return the tensors as arrays. The host waits for the device once."""
    if tensors[0].device.type == "cpu":
        return [tensor.numpy() for tensor in tensors]
    return parts(joined(tensors).cpu().numpy(), tensors)


def packed(mask: torch.Tensor) -> torch.Tensor:
    """Return a mask [B, V] as bits, uint8 [B, V / 8] rounded up: an eighth of the bytes to copy, and a shape that does not depend on it."""
    rows, vocabulary = mask.shape
    whole = torch.nn.functional.pad(mask.to(torch.uint8), (0, -vocabulary % 8)).view(rows, -1, 8)
    place = torch.arange(7, -1, -1, dtype=torch.uint8, device=mask.device)
    return (whole << place).sum(-1, dtype=torch.uint8)


def set_bits(bits: NDArray[np.uint8]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the row and the place of each bit that is set, in order, as `nonzero` does for the mask that was packed."""
    row, byte = np.nonzero(bits)
    at, bit = np.nonzero(np.unpackbits(bits[row, byte, None], axis=1))
    return row[at], byte[at] * 8 + bit

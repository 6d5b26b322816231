"""A torch model as manifest entries, and manifest entries as views of a segment."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from atropos_bridge_ipc.manifest import Tensor
from atropos_bridge_ipc.segment import Exported
from atropos_core.errors import FitError, WeightsMismatch


def saved(model: nn.Module) -> dict[str, torch.Tensor]:
    """Every parameter and persistent buffer under every name that it has."""
    transient = {name for name, _ in _buffers(model, persistent=False)}
    found: dict[str, torch.Tensor] = dict(model.named_parameters(remove_duplicate=False))
    found |= {name: buffer for name, buffer in _buffers(model, persistent=True) if name not in transient}
    return found


def transient(model: nn.Module) -> dict[str, torch.Tensor]:
    """The buffers that are not saved: each model makes them from its config."""
    return dict(_buffers(model, persistent=False))


def describe(model: nn.Module) -> tuple[list[Tensor], list[torch.Tensor]]:
    """Apply describe_tensors to every parameter and persistent buffer."""
    return describe_tensors(saved(model))


def describe_tensors(every: Mapping[str, torch.Tensor]) -> tuple[list[Tensor], list[torch.Tensor]]:
    """Describe each distinct tensor once, in order, and return the tensors too. Two at one place in memory count as tied.
    Raises WeightsMismatch for a tensor that cannot be shared."""
    names: dict[Any, list[str]] = {}
    first: dict[Any, torch.Tensor] = {}
    for name, tensor in every.items():
        # On the meta device everything is at address 0, so there only the object tells.
        key = (
            id(tensor)
            if tensor.is_meta or not tensor.numel()
            else (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        )
        names.setdefault(key, []).append(name)
        first.setdefault(key, tensor)
    described = [_entry(names[key], tensor) for key, tensor in first.items()]
    for entry in described:
        if entry.span_bytes != entry.itemsize * torch.Size(entry.shape).numel():
            raise WeightsMismatch(f"{entry.name!r} ({entry}) has gaps in memory, and cannot be shared as it is.")
    return described, list(first.values())


@torch.no_grad()
def move(every: Mapping[str, torch.Tensor], placed: Sequence[Tensor], make: Callable[[], Exported]) -> Exported:
    """Move the tensors into the segment that `make` makes, one by one, so that at most one exists twice. Tensor objects
    and their ties stay as they are, even if `make` raises FitError.

    Host memory gets its pages as they are written. A segment on a GPU is there as a whole from the start, so the tensors
    wait for it in host memory."""
    device = every[placed[0].name].device
    if device.type == "cuda":
        for entry in placed:
            _put(every, entry, every[entry.name].detach().cpu())
        torch.cuda.empty_cache()
    try:
        exported = make()
    except FitError:
        for entry in placed:
            _put(every, entry, every[entry.name].to(device))
        raise
    for entry in placed:
        target = view(exported.flat, entry)
        target.copy_(every[entry.name])
        _put(every, entry, target)
    return exported


def _put(every: Mapping[str, torch.Tensor], entry: Tensor, data: torch.Tensor) -> None:
    for name in entry.names:
        every[name].data = data


def view(flat: torch.Tensor, entry: Tensor) -> torch.Tensor:
    """The entry's tensor, in the segment's own memory."""
    stretch = flat[entry.offset : entry.offset + entry.nbytes]
    return stretch.view(getattr(torch, entry.dtype)).as_strided(entry.shape, entry.stride)


def owners(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    """The module that holds a tensor, and the tensor's name there."""
    path, _, leaf = name.rpartition(".")
    return model.get_submodule(path), leaf


def digest(tensor: torch.Tensor) -> str:
    """A short digest of dtype, shape and bytes."""
    raw = (
        tensor.detach().cpu().contiguous().view(torch.uint8)
        if tensor.ndim
        else tensor.detach().cpu().reshape(1).view(torch.uint8)
    )
    return f"{_dtype(tensor)} {list(tensor.shape)} {hashlib.sha256(raw.numpy().tobytes()).hexdigest()[:16]}"


def _entry(names: list[str], tensor: torch.Tensor) -> Tensor:
    return Tensor(
        names[0], tuple(names[1:]), _dtype(tensor), tuple(tensor.shape), tuple(tensor.stride()), tensor.element_size()
    )


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _buffers(model: nn.Module, *, persistent: bool) -> Iterator[tuple[str, torch.Tensor]]:
    for path, module in model.named_modules(remove_duplicate=False):
        for leaf, buffer in module._buffers.items():
            if buffer is not None and (leaf not in module._non_persistent_buffers_set) is persistent:
                yield f"{path}.{leaf}" if path else leaf, buffer

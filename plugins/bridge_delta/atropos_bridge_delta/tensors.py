"""The tensors of a model as both ends see them: each storage once, in the order of the model's own, as patterns of bits."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from atropos_core.errors import WeightsMismatch

INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes of an element
SAME_MODEL = "Trainer and engine must open the same model directory."


class Described(NamedTuple):
    """One tensor; as a list it is what travels."""

    name: str
    dtype: str  # "bfloat16"
    shape: list[int]


def tensors_of(model: torch.nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers that a checkpoint has, tied ones under their first name."""
    present: dict[str, Tensor] = model.state_dict(keep_vars=True)  # the objects themselves, so that ties show
    first: dict[int, str] = {}
    for name, tensor in present.items():
        first.setdefault(id(tensor), name)
    return {name: present[name].detach() for name in first.values()}


def describe(tensors: Mapping[str, Tensor]) -> list[Described]:
    return [Described(name, _dtype(one), list(one.shape)) for name, one in tensors.items()]


def check_same(wanted: Sequence[Sequence[Any]], ours: Sequence[Described], whose: str) -> None:
    """Raises WeightsMismatch unless names and shapes are the same. Dtypes may differ: what travels is converted to the engine's."""
    given = {name: list(shape) for name, _, shape in wanted}
    present = {one.name: one.shape for one in ours}
    for name in sorted(given.keys() | present.keys()):
        if given.get(name) != present.get(name):
            raise WeightsMismatch(
                f"{name!r} is {present.get(name, 'nothing')} in {whose}, and {given.get(name, 'nothing')} at the other end of the bridge.",
                remedy=SAME_MODEL,
            )


def bits(tensor: Tensor) -> Tensor:
    """[N] integers in the tensor's own memory. Raises WeightsMismatch for one that does not lie there in one piece."""
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


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")

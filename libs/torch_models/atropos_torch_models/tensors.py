"""The tensors of a model as both ends of a bridge name them: each storage once, in the model's own order. Does not import torch: the
bridge in the supervisor imports it too."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from atropos_core.errors import WeightsMismatch

SAME_MODEL = "Trainer and engine must open the same model directory."


class Described(NamedTuple):
    """One tensor; it is sent as a list."""

    name: str
    dtype: str  # "bfloat16"
    shape: list[int]


def tensors_of(model: Any) -> dict[str, Any]:
    """Return the parameters and buffers that a checkpoint of this torch module has, tied ones under their first name."""
    present = model.state_dict(keep_vars=True)  # the objects themselves, so that ties show
    first: dict[int, str] = {}
    for name, tensor in present.items():
        first.setdefault(id(tensor), name)
    return {name: present[name].detach() for name in first.values()}


def describe(tensors: Mapping[str, Any]) -> list[Described]:
    return [Described(name, str(one.dtype).removeprefix("torch."), list(one.shape)) for name, one in tensors.items()]


def of_all(engines: Sequence[Sequence[Sequence[Any]]]) -> Sequence[Sequence[Any]] | None:
    """Return the tensors that all engines have, None without engines. Raises WeightsMismatch unless all have the same."""
    if any(one != engines[0] for one in engines):
        raise WeightsMismatch(
            "the engines have different tensors or dtypes, but one update goes to all of them.",
            remedy="Give every engine the same model and dtype, or use --bridge checkpoint.",
        )
    return engines[0] if engines else None


def check_same(wanted: Sequence[Sequence[Any]], ours: Sequence[Described], whose: str) -> None:
    """Raises WeightsMismatch if names or shapes differ. Dtypes may differ: values are converted to the engine's."""
    given = {name: list(shape) for name, _, shape in wanted}
    present = {one.name: one.shape for one in ours}
    for name in sorted(given.keys() | present.keys()):
        if given.get(name) != present.get(name):
            raise WeightsMismatch(
                f"{name!r} is {present.get(name, 'nothing')} in {whose}, and {given.get(name, 'nothing')} at the other end of the bridge.",
                remedy=SAME_MODEL,
            )

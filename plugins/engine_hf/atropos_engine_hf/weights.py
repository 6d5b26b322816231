"""Replace a model's weights by those of a model directory. If the tensors do not match exactly, none is changed."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from atropos_core.errors import WeightsMismatch
from atropos_torch_models.stored_tensors import Conversion, converted_shapes

SAME_MODEL = "Trainer and engine must open the same model directory with the same dtype (trainer.dtype, engine.dtype)."
_ONE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_STORED = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip


async def replace(model: nn.Module, directory: Path) -> None:
    """Copy the weights tensor by tensor into the model's own storage, so that tied weights stay tied.

    Raises WeightsMismatch, before any change, if a name, a shape or a dtype differs."""
    try:
        files = _files(directory)
        with _opened(files) as file_of, torch.no_grad():
            wanted, converting = _check(model, files, file_of)
            for one in converting:
                for name, tensor in one.tensors(lambda name: file_of(name).get_tensor(name)).items():
                    wanted[name].copy_(tensor)
                await asyncio.sleep(0)
    except (OSError, SafetensorError, ValueError, KeyError, RuntimeError) as error:
        raise WeightsMismatch(
            f"engine 'hf' cannot read weights from {directory}: {type(error).__name__}: {error}"
        ) from error


def _files(directory: Path) -> dict[str, Path]:
    """Return the file of each tensor."""
    index = directory / _INDEX
    if index.is_file():
        file_of: Mapping[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        return {name: directory / file for name, file in file_of.items()}
    with safe_open(directory / _ONE, framework="pt") as stored:
        return dict.fromkeys(stored.keys(), directory / _ONE)


@contextmanager
def _opened(files: Mapping[str, Path]) -> Iterator[Callable[[str], Any]]:
    """Open all files, and yield what returns the one of a tensor."""
    with ExitStack() as stack:
        opened = {path: stack.enter_context(safe_open(path, framework="pt")) for path in sorted(set(files.values()))}
        yield lambda name: opened[files[name]]


def _check(
    model: nn.Module, files: Mapping[str, Path], file_of: Callable[[str], Any]
) -> tuple[dict[str, torch.Tensor], list[Conversion]]:
    """Return the model's tensors by every name that they have, and how those of the files become them. Raises WeightsMismatch if the
    files do not match."""
    present: dict[str, torch.Tensor] = model.state_dict(keep_vars=True)  # the objects themselves, so that ties show
    described = {}
    for name in files:
        there = file_of(name).get_slice(name)
        described[name] = (_dtype(there.get_dtype()), there.get_shape())
    found = list(converted_shapes(model, described))
    made = {name: (one, shape) for one, shapes in found for name, shape in shapes.items()}
    if extra := sorted(made.keys() - present.keys()):
        _, unknown = made[extra[0]][0].sources[0]
        raise WeightsMismatch(
            f"{files[unknown]} has {_some(extra)}, and the engine's model has no such tensor.", remedy=SAME_MODEL
        )
    given = {id(present[name]) for name in made}
    if missing := sorted(name for name, tensor in present.items() if id(tensor) not in given):
        raise WeightsMismatch(
            f"the engine's model has {_some(missing)}, and {next(iter(files.values())).parent} has no such tensor.",
            remedy=SAME_MODEL,
        )
    for name, (one, shape) in made.items():
        tensor = present[name]
        if (shape.dtype, shape.shape) != (tensor.dtype, tensor.shape):
            raise WeightsMismatch(
                f"{name!r} is {shape.dtype} {list(shape.shape)} in {files[one.sources[0][1]]},"
                f" and {tensor.dtype} {list(tensor.shape)} in the engine's model.",
                remedy=SAME_MODEL,
            )
    return present, [one for one, _ in found]


def _dtype(name: str) -> torch.dtype:
    if name not in _STORED:
        raise ValueError(f"a tensor is stored as {name}, which this engine does not read")
    return _STORED[name]


def _some(names: list[str]) -> str:
    return repr(names[0]) + (f" and {len(names) - 1} more" if len(names) > 1 else "")

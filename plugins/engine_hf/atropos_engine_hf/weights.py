"""Replace a model's weights by those of a model directory. If the tensors do not match exactly, none is changed."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from atropos_core.errors import WeightsMismatch

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
        wanted = _check(model, files)
        for file in sorted(set(files.values())):
            with safe_open(file, framework="pt") as stored, torch.no_grad():
                for name in stored.keys():  # noqa: SIM118 - it is not a dictionary
                    wanted[name].copy_(stored.get_tensor(name))
                    await asyncio.sleep(0)
    except (OSError, SafetensorError, ValueError, KeyError) as error:
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


def _check(model: nn.Module, files: Mapping[str, Path]) -> dict[str, torch.Tensor]:
    """Return the model's tensors by every name that they have. Raises WeightsMismatch if the files do not match them."""
    present: dict[str, torch.Tensor] = model.state_dict(keep_vars=True)  # the objects themselves, so that ties show
    if extra := sorted(files.keys() - present.keys()):
        raise WeightsMismatch(
            f"{files[extra[0]]} has {_some(extra)}, and the engine's model has no such tensor.", remedy=SAME_MODEL
        )
    given = {id(present[name]) for name in files}
    if missing := sorted(name for name, tensor in present.items() if id(tensor) not in given):
        raise WeightsMismatch(
            f"the engine's model has {_some(missing)}, and {next(iter(files.values())).parent} has no such tensor.",
            remedy=SAME_MODEL,
        )
    for file in sorted(set(files.values())):
        with safe_open(file, framework="pt") as stored:
            for name in stored.keys():  # noqa: SIM118 - it is not a dictionary
                tensor, there = present[name], stored.get_slice(name)
                found = (_STORED.get(there.get_dtype()), tuple(there.get_shape()))
                if found != (tensor.dtype, tuple(tensor.shape)):
                    raise WeightsMismatch(
                        f"{name!r} is {found[0]} {list(found[1])} in {file},"
                        f" and {tensor.dtype} {list(tensor.shape)} in the engine's model.",
                        remedy=SAME_MODEL,
                    )
    return present


def _some(names: list[str]) -> str:
    return repr(names[0]) + (f" and {len(names) - 1} more" if len(names) > 1 else "")

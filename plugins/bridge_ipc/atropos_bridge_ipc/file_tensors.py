"""The tensors of a model directory's safetensors files, one at a time, to prove that a mapping is correct."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn

from atropos_bridge_ipc.manifest import Tensor
from atropos_core.errors import FitError, WeightsMismatch
from atropos_torch_models.stored_tensors import Conversion, converted_shapes


def each(model: nn.Module, directory: Path, wanted: Iterable[Tensor]) -> Iterator[tuple[Tensor, torch.Tensor]]:
    """Every entry of `wanted`, which describes tensors of `model`, with the tensor that the files have for one of its names, on the
    CPU. Raises FitError for an entry that is not stored, or stored in another shape."""
    entries = {name: entry for entry in wanted for name in entry.names}
    with ExitStack() as stack:
        files: dict[str, tuple[Path, Any]] = {}
        for path in sorted(directory.glob("*.safetensors")):
            file = stack.enter_context(safe_open(path, "pt"))
            files |= {name: (path, file) for name in file.keys() if name not in files}  # noqa: SIM118 - not a mapping
        for one, targets in _found(model, directory, files, entries):
            made = one.tensors(lambda name: files[name][1].get_tensor(name))
            yield from ((entries[target], made[target]) for target in targets)


def _found(
    model: nn.Module, directory: Path, files: dict[str, tuple[Path, Any]], entries: dict[str, Tensor]
) -> list[tuple[Conversion, list[str]]]:
    """Return how tensors of the files become those of `entries`, which has them by each of their names, and the names that each makes.
    An entry occurs once, even if it is tied under other names."""
    described = {name: (torch.float32, file.get_slice(name).get_shape()) for name, (_, file) in files.items()}
    waiting, found = dict(entries), []
    for one, shapes in converted_shapes(model, described):
        targets = []
        for name, shape in shapes.items():
            if name not in waiting:
                continue
            entry = waiting[name]
            if tuple(shape.shape) != entry.shape:
                path = files[one.sources[0][1]][0]
                raise FitError(f"{name!r} is {list(shape.shape)} in {path}, and the trainer's model has {entry}.")
            for alias in entry.names:
                del waiting[alias]
            targets.append(name)
        if targets:
            found.append((one, targets))
    if waiting:
        raise FitError(
            f"{directory} has no safetensors tensor for {next(iter(waiting))!r}, which the trainer's model has.",
            remedy="Bridge 'ipc' needs weights that transformers loads into this model:"
            " save the model with save_pretrained, or use `--bridge checkpoint`.",
        )
    return found


def check_names(directory: Path, wanted: Iterable[Tensor]) -> None:
    """Raise FitError unless every entry of `wanted`, which describes what files would have, is stored under one of its names, in its
    shape. Code that reads such directories can then load it by that name."""
    waiting = {name: entry for entry in wanted for name in entry.names}
    for path in sorted(directory.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118 - not a mapping
                if (entry := waiting.get(name)) is None:
                    continue
                shape = tuple(file.get_slice(name).get_shape())
                if shape != entry.shape:
                    raise FitError(f"{name!r} is {list(shape)} in {path}, and the trainer's model has {entry}.")
                for alias in entry.names:
                    del waiting[alias]
    if waiting:
        raise FitError(
            f"{directory} has no safetensors tensor named {next(iter(waiting))!r}, which the trainer's model has.",
            remedy="Bridge 'ipc' copies weights under the names that save_pretrained gives them:"
            " save the model with it, or use `--bridge checkpoint`.",
        )


def check_value(name: str, shared: torch.Tensor, stored: torch.Tensor) -> None:
    """Raise WeightsMismatch unless the engine's tensor equals the model directory's, bit for bit."""
    expected = stored.to(shared.dtype).to(shared.device)
    if _same_bits(shared, expected):
        return
    hint = ""
    if shared.ndim == 2 and shared.shape[0] == shared.shape[1] and _same_bits(shared, expected.t()):
        hint = " It is transposed."
    different = int((shared != expected).sum())
    raise WeightsMismatch(
        f"{name!r}: the engine's values are not those of the model directory: {different} of {shared.numel()} differ, by"
        f" {float((shared.float() - expected.float()).abs().max()):.3g} at most.{hint}",
        remedy="Trainer and engine must open the same model directory, and nothing may have changed the engine's weights since.",
    )


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(*(tensor.detach().contiguous().reshape(-1).view(torch.uint8) for tensor in (a, b)))

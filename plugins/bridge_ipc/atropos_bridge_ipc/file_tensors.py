"""The tensors of a model directory's safetensors files, one at a time, to prove that a mapping is correct."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from safetensors import safe_open

from atropos_bridge_ipc.manifest import Tensor
from atropos_core.errors import FitError, WeightsMismatch


def each(directory: Path, wanted: Iterable[Tensor]) -> Iterator[tuple[Tensor, torch.Tensor]]:
    """Every entry of `wanted` with the tensor stored under one of its names, on the CPU, in the order of the files.
    Raises FitError for an entry that is not stored, or stored in another shape."""
    for path, names in _tensors_by_file(directory, wanted).items():
        with safe_open(path, "pt") as file:
            for name, entry in names.items():
                yield entry, file.get_tensor(name)


def check_names(directory: Path, wanted: Iterable[Tensor]) -> None:
    """Raise FitError unless every entry of `wanted` is stored under one of its names, in its shape. Code that reads such
    directories can then load it by that name."""
    _tensors_by_file(directory, wanted)


def _tensors_by_file(directory: Path, wanted: Iterable[Tensor]) -> dict[Path, dict[str, Tensor]]:
    """Return file -> name in it -> entry. Each entry occurs once, even if it is tied under other names."""
    waiting = {name: entry for entry in wanted for name in entry.names}
    found: dict[Path, dict[str, Tensor]] = {}
    for path in sorted(directory.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118 - not a mapping
                if name not in waiting:
                    continue
                entry = waiting[name]
                for alias in entry.names:
                    del waiting[alias]
                shape = tuple(file.get_slice(name).get_shape())
                if shape != entry.shape:
                    raise FitError(f"{name!r} is {list(shape)} in {path}, and the trainer's model has {entry}.")
                found.setdefault(path, {})[name] = entry
    if waiting:
        raise FitError(
            f"{directory} has no safetensors tensor named {next(iter(waiting))!r}, which the trainer's model has.",
            remedy="Bridge 'ipc' needs weights stored under the names that the trainer's model gives them:"
            " save the model with save_pretrained, or use `--bridge checkpoint`.",
        )
    return found


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

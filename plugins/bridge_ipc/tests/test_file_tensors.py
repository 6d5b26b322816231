"""Every value that the trainer gets from an engine, against the model directory's own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from atropos_bridge_ipc import file_tensors, tensors
from atropos_core.errors import FitError, WeightsMismatch


def test_each_tensor_of_a_model_is_found_once_under_one_of_its_names(tiny: Path, holders: Any) -> None:
    model = holders.loaded(tiny).model
    described, found = tensors.describe(model)
    mine = {entry.name: tensor for entry, tensor in zip(described, found, strict=True)}
    seen = []
    for entry, value in file_tensors.each(model, tiny, described):
        file_tensors.check_value(entry.name, mine[entry.name], value)
        seen.append(entry.name)
    assert sorted(seen) == sorted(mine)


def test_a_tensor_that_the_directory_lacks_or_has_in_another_shape_is_named(
    tiny: Path, tmp_path: Path, holders: Any
) -> None:
    model = holders.loaded(tiny).model
    described, _ = tensors.describe(model)
    weights = load_file(tiny / "model.safetensors")
    norm = weights.pop("model.norm.weight")
    save_file(weights, tmp_path / "model.safetensors")
    with pytest.raises(FitError, match="has no safetensors tensor named 'model.norm.weight'"):
        file_tensors.check_names(tmp_path, described)
    save_file({**weights, "model.norm.weight": norm[:-1].clone()}, tmp_path / "model.safetensors")
    with pytest.raises(FitError, match=r"'model.norm.weight' is \[31\] in .*trainer's model has float32 \[32\]"):
        list(file_tensors.each(model, tmp_path, described))


def test_one_bit_of_difference_is_found_and_a_transposed_matrix_is_called_one() -> None:
    matrix = torch.randn(8, 8)
    file_tensors.check_value("w", matrix, matrix.clone())
    other = matrix.clone()
    other.view(torch.int32)[3, 3] ^= 1
    with pytest.raises(WeightsMismatch, match=r"'w': the engine's values .* 1 of 64 differ, by \S+ at most\.\n"):
        file_tensors.check_value("w", other, matrix)
    with pytest.raises(WeightsMismatch, match=r"'w': .* It is transposed\."):
        file_tensors.check_value("w", matrix.t(), matrix)


def test_a_checkpoint_in_another_precision_is_compared_after_the_same_cast() -> None:
    wide = torch.randn(7, 5)
    file_tensors.check_value("w", wide.bfloat16(), wide)
    with pytest.raises(WeightsMismatch):
        file_tensors.check_value("w", (wide * 1.01).bfloat16(), wide)

"""An adapter of a client on disk: an ordinary directory of peft's, and Adam's moments next to it."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from peft import LoraConfig, PeftModel
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from atropos_core.errors import CheckpointError
from atropos_core.storage.checkpoint import AS_WRITTEN
from atropos_trainer_grpo import lora
from atropos_trainer_grpo.stepwise.adapter import MOMENTS, STEP, Adapter
from atropos_trainer_grpo.stepwise.layers import MOST_RANK

OPTIMIZER = "adam.safetensors"
CONFIG = "adapter_config.json"
PLAIN: Mapping[str, Any] = {  # settings of peft with which an adapter is plain LoRA
    "bias": "none", "use_dora": False, "use_rslora": False, "modules_to_save": None, "rank_pattern": {}, "alpha_pattern": {},
    "layer_replication": None, "trainable_token_indices": None, "exclude_modules": None, "lora_bias": False,
}  # fmt: skip


class Saved(NamedTuple):
    config: LoraConfig
    weights: dict[str, Tensor]
    moments: dict[str, Tensor] | None


def write(model: PeftModel, adapter: Adapter, directory: Path, *, moments: bool) -> None:
    lora.save(model, directory, adapter.key)
    if moments:
        save_file(adapter.moments(), directory / OPTIMIZER)


def read(directory: Path, *, moments: bool) -> Saved:
    """Read a directory that `write`, or peft, has filled. Raises CheckpointError."""
    try:
        fields = json.loads((directory / CONFIG).read_text(encoding="utf-8"))
        weights = load_file(directory / lora.WEIGHTS)
        saved = load_file(directory / OPTIMIZER) if moments else None
    except (OSError, ValueError, SafetensorError) as error:
        raise CheckpointError(f"the adapter in {directory} cannot be read: {error}.", remedy=AS_WRITTEN) from error
    return Saved(_config(fields, directory), weights, saved)


def load(adapter: Adapter, saved: Saved, directory: Path) -> None:
    """Copy what was read into an adapter that was made from its configuration. Raises CheckpointError before anything is copied."""
    shapes = {name: tuple(parameter.shape) for name, parameter in adapter.parameters.items()}
    _check_fit(saved.weights, shapes, directory / lora.WEIGHTS)
    if saved.moments is not None:
        expected: dict[str, tuple[int, ...]] = {f"{STEP}.{name}": (1,) for name in shapes}
        expected |= {f"{kind}.{name}": shape for kind in MOMENTS for name, shape in shapes.items()}
        _check_fit(saved.moments, expected, directory / OPTIMIZER)
    with torch.no_grad():
        for name, parameter in adapter.parameters.items():
            parameter.copy_(saved.weights[name])
    if saved.moments is not None:
        adapter.load_moments(saved.moments)


def _config(fields: Any, directory: Path) -> LoraConfig:
    file = directory / CONFIG
    if not isinstance(fields, dict) or fields.get("peft_type") != "LORA":
        raise CheckpointError(f"{file} does not describe a LoRA adapter of peft.", remedy=AS_WRITTEN)
    if other := [name for name, usual in PLAIN.items() if fields.get(name, usual) not in (usual, None)]:
        raise CheckpointError(
            f"{file} sets {other[0]} = {fields[other[0]]!r:.100}, which trainer 'grpo' does not train.",
            remedy="Restore an adapter of plain LoRA.",
        )
    rank, alpha = fields.get("r"), fields.get("lora_alpha")
    if type(rank) is not int or not 1 <= rank <= MOST_RANK:
        raise CheckpointError(f"{file} has the rank {rank!r:.100}: 1 to {MOST_RANK} is expected.", remedy=AS_WRITTEN)
    if not isinstance(alpha, int | float) or not math.isfinite(alpha) or alpha <= 0:
        raise CheckpointError(f"{file} has the alpha {alpha!r:.100}: a number above 0 is expected.", remedy=AS_WRITTEN)
    names = {kind: fields.get(kind) or [] for kind in ("target_modules", "target_parameters")}
    for kind, found in names.items():
        if not isinstance(found, list) or not all(isinstance(name, str) for name in found):
            raise CheckpointError(
                f"{file} has {kind} = {found!r:.100}: a list of names is expected.", remedy=AS_WRITTEN
            )
    return LoraConfig(
        task_type="CAUSAL_LM",
        r=rank,
        lora_alpha=alpha,  # type: ignore[arg-type] # peft types it as an int, and only divides it by the rank
        target_modules=names["target_modules"],
        target_parameters=names["target_parameters"] or None,
    )


def _check_fit(tensors: Mapping[str, Tensor], expected: Mapping[str, tuple[int, ...]], file: Path) -> None:
    if other := sorted(tensors.keys() ^ expected.keys()):
        what = "has" if other[0] in tensors else "lacks"
        raise CheckpointError(f"{file} {what} {other[0]!r}, unlike the adapter that it describes.", remedy=AS_WRITTEN)
    for name, tensor in tensors.items():
        if tuple(tensor.shape) != expected[name] or not tensor.is_floating_point():
            raise CheckpointError(
                f"{file} has {name!r} as {tensor.dtype} of shape {list(tensor.shape)}, not as floats of shape {list(expected[name])}.",
                remedy=AS_WRITTEN,
            )
        if not torch.isfinite(tensor).all():
            raise CheckpointError(f"{file} has entries in {name!r} that are not finite numbers.", remedy=AS_WRITTEN)

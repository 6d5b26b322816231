"""The trainer's checkpoint: a standard model directory, plus files that only this trainer needs.

An adapter is saved as a peft directory that names its base model; transformers and peft also load it.
"""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Mapping
from pathlib import Path
from pickle import UnpicklingError
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import nn

from atropos_core.errors import CheckpointError
from atropos_core.storage.checkpoint import AS_WRITTEN, taking_up
from atropos_torch_models import tokenizer_files
from atropos_torch_models.stored_tensors import Conversion, converted_shapes
from atropos_trainer_grpo import sharded_state
from atropos_trainer_grpo.model import NEUTRAL, language_model
from atropos_trainer_grpo.optimizer import Optimizer
from atropos_trainer_grpo.process_group import part

if TYPE_CHECKING:
    from atropos_trainer_grpo.sharding import Sharded

WEIGHTS = "model.safetensors"
STATE = "trainer_state.pt"


def save(model: nn.Module, state: Mapping[str, Any], origin: Path, directory: Path) -> None:
    """Fill an existing, empty directory: weights and config in Hugging Face form, tokenizer of `origin`, the optimiser's
    state."""
    if _is_adapted(model):
        from atropos_trainer_grpo import lora

        lora.save(model, directory)  # without config.json: loaders would look for the base model's weights here
    else:
        _save_whole(model, directory)
        _as_origin(origin, directory)
    tokenizer_files.copy(origin, directory)
    torch.save({"optimizer": state, "random": _random_states()}, directory / STATE)


def _save_whole(model: Any, directory: Path) -> None:
    implementation = model.config._attn_implementation
    model.save_pretrained(directory, max_shard_size="100TB")  # one file, whatever its size
    model.config._attn_implementation = implementation


def _as_origin(origin: Path, directory: Path) -> None:
    """Give the checkpoint the settings that training has switched off, and if only the language model of `origin` was opened, its other
    parts as they are there. So the class that loads `origin` loads it too."""
    before, saved = (json.loads((one / "config.json").read_text(encoding="utf-8")) for one in (origin, directory))
    if "text_config" in before and "text_config" not in saved:
        _add_other_parts(origin, directory)
        made = before | {"dtype": saved["dtype"], "text_config": before["text_config"] | {"dtype": saved["dtype"]}}
    else:
        made = saved | {name: before[name] for name in NEUTRAL if name in before}
        if "text_config" in before:
            made["text_config"] = saved["text_config"] | {
                name: before["text_config"][name] for name in NEUTRAL if name in before["text_config"]
            }
    if made != saved:
        (directory / "config.json").write_text(json.dumps(made, indent=2) + "\n", encoding="utf-8")


def _add_other_parts(origin: Path, directory: Path) -> None:
    """Copy the tensors of `origin` that are not of its language model into the file of weights, and what its processor needs."""
    weights = load_file(directory / WEIGHTS)
    for path in sorted(origin.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118 - not a dictionary
                if "language_model." not in name and not name.endswith("lm_head.weight"):
                    weights.setdefault(name, file.get_tensor(name))
    save_file(weights, directory / "with-other-parts", metadata={"format": "pt"})
    (directory / "with-other-parts").replace(directory / WEIGHTS)
    for path in origin.glob("*processor_config.json"):
        shutil.copy(path, directory / path.name)


@torch.no_grad()
def restore(model: nn.Module, optimizer: Optimizer, directory: Path, sharded: Sharded | None = None) -> None:
    """Copy a saved state into the existing parameters and into the optimiser. With `sharded`, `model` is its model: every
    rank reads the state and keeps its part. Raises CheckpointError before anything has changed."""
    file, present = _parameters(model)
    try:
        weights = load_file(directory / file)
        converting, shapes = _conversions(model, weights)
        state = torch.load(directory / STATE, map_location="cpu", weights_only=True)
    except (OSError, EOFError, RuntimeError, ValueError, SafetensorError, UnpicklingError) as error:
        raise CheckpointError(
            f"the trainer's checkpoint in {directory} cannot be read: {error}.", remedy=AS_WRITTEN
        ) from error
    _check_fit(shapes, present, directory / file, {} if sharded is None else sharded.stored)
    if _is_adapted(model):
        _check_adapter(model, weights, present, directory)
    named = f"the trainer's state in {directory / STATE}"
    with taking_up(named):
        optimizer.refuse_other(state["optimizer"])
        if sharded_state.are_named(state["optimizer"]):
            state["optimizer"] = sharded_state.read(state["optimizer"], optimizer.parameters, directory)
        elif sharded is not None:
            state["optimizer"] = sharded.divided(state["optimizer"])
        optimizer.refuse_other_form(state["optimizer"])
        _set_random_states(state["random"])
    for one in converting:
        for name, tensor in one.tensors(weights.__getitem__).items():
            if (parameter := present.get(name)) is not None:
                parameter.copy_(part(parameter, tensor))
    optimizer.adopt()
    with taking_up(named):
        optimizer.load(state["optimizer"])


def _is_adapted(model: nn.Module) -> bool:
    return language_model(model) is not model


def _parameters(model: nn.Module) -> tuple[str, Mapping[str, torch.Tensor]]:
    """The checkpoint's file with the parameters, and the parameters by their names in it."""
    if not _is_adapted(model):
        return WEIGHTS, dict(model.named_parameters())
    from atropos_trainer_grpo import lora

    return lora.WEIGHTS, lora.tensors(model)


def _conversions(
    model: nn.Module, weights: Mapping[str, torch.Tensor]
) -> tuple[list[Conversion], Mapping[str, torch.Tensor]]:
    """How the file's tensors become parameters, and those in its shapes and dtypes, by their names in the model. An adapter's are
    named alike."""
    if _is_adapted(model):
        return [Conversion(name, model, None, [(name, name)]) for name in weights], weights
    found = list(converted_shapes(model, {name: (one.dtype, one.shape) for name, one in weights.items()}))
    return [one for one, _ in found], {name: shape for _, made in found for name, shape in made.items()}


def _check_fit(
    weights: Mapping[str, torch.Tensor],
    parameters: Mapping[str, torch.Tensor],
    file: Path,
    stored: Mapping[str, torch.dtype],  # the dtype of parameters that are stored in another one
) -> None:
    for name, parameter in parameters.items():
        saved = weights.get(name)
        found = None if saved is None else (tuple(saved.shape), saved.dtype)
        expected = (tuple(parameter.shape), stored.get(name, parameter.dtype))
        if found != expected:
            raise CheckpointError(
                f"{file}: parameter {name!r} is {found or 'missing'}, but the model that is restored has {expected}.",
                remedy=AS_WRITTEN,
            )


def _check_adapter(
    model: Any, weights: Mapping[str, torch.Tensor], present: Mapping[str, torch.Tensor], directory: Path
) -> None:
    """Refuse other targets or layers, which would silently drop trained parts, and another alpha, which would scale them."""
    if left := sorted(weights.keys() - present.keys()):
        raise CheckpointError(
            f"the adapter in {directory} has {left[0]!r} and {len(left) - 1} more parameters that this run's adapter does not have.",
            remedy="Set trainer.lora.targets and trainer.lora.layers to the values of that run.",
        )
    with taking_up(f"the adapter's {directory / 'adapter_config.json'}"):
        saved = json.loads((directory / "adapter_config.json").read_text())["lora_alpha"]
    now = model.peft_config["default"].lora_alpha
    if saved != now:
        raise CheckpointError(
            f"the adapter in {directory} was trained with alpha {saved}, but this run has {now}, which would be another policy.",
            remedy=f"Set trainer.lora.alpha={saved}.",
        )


def _random_states() -> dict[str, Any]:
    name, keys, place, has_gauss, gauss = np.random.get_state()
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else [],
        "numpy": [
            str(name),
            torch.from_numpy(np.asarray(keys).astype(np.int64)),
            int(place),
            int(has_gauss),
            float(gauss),
        ],
        "python": [random.getstate()[0], list(random.getstate()[1]), random.getstate()[2]],
    }


def _set_random_states(states: Mapping[str, Any]) -> None:
    name, keys, place, has_gauss, gauss = states["numpy"]
    version, numbers, gauss_next = states["python"]
    if type(place) is not int or not 0 <= place <= len(keys) or has_gauss not in (0, 1) or type(gauss) is not float:
        raise ValueError(f"numpy's random state is at {place!r:.60}, with {has_gauss!r:.60} and {gauss!r:.60}")
    if not isinstance(gauss_next, float | None):
        raise ValueError(f"Python's random state has the next number {gauss_next!r:.60}")
    torch.set_rng_state(states["torch"])
    if states["cuda"]:
        torch.cuda.set_rng_state_all(states["cuda"])
    np.random.set_state((name, keys.numpy().astype(np.uint32), place, has_gauss, gauss))
    random.setstate((version, tuple(numbers), gauss_next))

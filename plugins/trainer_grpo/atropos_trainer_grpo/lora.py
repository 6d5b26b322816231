"""LoRA (arXiv 2106.09685) by peft: the base model is frozen, and low-rank adapters of its linear layers are trained.

Adapters are always in fp32 and compute in the base's dtype, as in vLLM: their two matrices are rounded, while inputs and outputs are not
cast to fp32.
"""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict
from peft.tuners.lora import LoraLayer
from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers
from safetensors.torch import save_file
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D  # a linear layer with its matrix transposed, as in GPT-2

from atropos_core.errors import ConfigError, DataError
from atropos_core.models import model_size
from atropos_core.storage.reading import base_of_adapter
from atropos_torch_models import tokenizer_files

if TYPE_CHECKING:
    from atropos_trainer_grpo.config import LoraOptions

WEIGHTS = "adapter_model.safetensors"
NAME = "default"  # by which peft knows the trainer's own adapter
_LAYER = re.compile(r"\.(\d+)\.")  # the index of a layer in a module's path: the first number in it


def attach(model: PreTrainedModel, options: LoraOptions, origin: Path) -> PeftModel:
    """Freeze the model and add adapters, which change nothing until they are trained (B = 0). Raises ConfigError
    if `targets` or `layers` name something that does not exist, or that peft cannot adapt."""
    targets, experts, layers = _chosen(model, options)
    if experts and options.dropout:
        raise ConfigError(
            "trainer.lora.dropout is set, but peft has no dropout for adapters of experts, which this model has.",
            remedy=f"Set trainer.lora.dropout=0, or adapt only linear layers: trainer.lora.targets={_listed(targets)}.",
        )
    config = LoraConfig(
        task_type="CAUSAL_LM",
        base_model_name_or_path=str(origin.resolve()),
        r=options.rank,
        lora_alpha=options.alpha,  # type: ignore[arg-type] # peft types it as an int, and only divides it by the rank
        lora_dropout=options.dropout,
        target_modules=targets,
        target_parameters=experts or None,
        layers_to_transform=layers,
    )
    try:
        adapted = get_peft_model(model, config)  # initialises A from torch's seed
    except ValueError as error:  # peft knows layers of Mamba whose weights are read past the layer
        named = [target for target in targets if f"'{target}'" in str(error)]
        raise ConfigError(
            f"peft cannot adapt {', '.join(map(repr, named)) or 'these layers'} of {type(model).__name__}: {str(error).splitlines()[0]}",
            remedy=f"--set trainer.lora.targets={_listed([one for one in targets if one not in named])} adapts the others.",
        ) from error
    assert isinstance(adapted, PeftModel), "peft gives another class only for mixed adapters"
    compute_in_inputs_dtype(adapted)
    adapted.eval()
    return adapted


def compute_in_inputs_dtype(model: nn.Module) -> None:
    """Have all adapters of a model round their matrices to the dtype of their inputs, instead of casting these to fp32."""
    for module in model.modules():
        if isinstance(module, LoraLayer):
            module.cast_input_dtype_enabled = False
            for matrix in (*module.lora_A.values(), *module.lora_B.values()):
                matrix.__class__ = InputsDtype


class InputsDtype(nn.Linear):
    """A linear layer that rounds its weight to the dtype of its input and computes in it."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(input, self.weight.to(input.dtype))


def tensors(model: nn.Module, adapter: str = NAME) -> dict[str, torch.Tensor]:
    """The adapter's tensors in place, under the names that peft saves them by."""
    found: dict[str, torch.Tensor] = get_peft_model_state_dict(model, adapter_name=adapter, save_embedding_layers=False)
    return found


def save(model: nn.Module, directory: Path, adapter: str = NAME) -> None:
    """Save like peft's save_pretrained, but without the README and without network access."""
    settings: Any = copy.copy(model.peft_config[adapter])  # type: ignore[index]
    settings.inference_mode = True
    settings.save_pretrained(directory)
    save_file(
        {name: tensor.contiguous() for name, tensor in tensors(model, adapter).items()},
        directory / WEIGHTS,
        metadata={"format": "pt"},
    )


def merge(adapter: Path, directory: Path) -> None:
    """Write the adapter's base model with the adapter merged into its weights (W + scale B A, computed in fp32, kept in the base's
    dtype), and the tokenizer next to the adapter. Raises DataError if the base model is not at the adapter's path."""
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    base = str(base_of_adapter(adapter))
    try:
        stored = AutoConfig.from_pretrained(base, trust_remote_code=False).dtype
        model: Any = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise DataError(
            f"the base model of the adapter in {adapter} cannot be loaded: {str(error).splitlines()[0]}",
            remedy=f"Put {base} back, or export only the adapter: without --merged.",
        ) from error
    size = model_size.read(Path(base))
    if size is not None and size.stored_bytes == 4 * size.parameters:
        stored = torch.float32  # also if config.json names another, as that of a GGUF file's directory does
    merged: Any = PeftModel.from_pretrained(model, str(adapter)).merge_and_unload(safe_merge=True)
    merged.to(stored).save_pretrained(directory)
    tokenizer_files.copy(adapter, directory)


def dropouts(model: nn.Module) -> list[nn.Module]:
    """The adapters' dropout layers, switched off."""
    found: list[nn.Module] = [
        module
        for name, module in model.named_modules()
        if ".lora_dropout." in name and isinstance(module, nn.Dropout) and module.p > 0
    ]
    for module in found:
        module.eval()
    return found


def _chosen(model: PreTrainedModel, options: LoraOptions) -> tuple[list[str], list[str], list[int] | None]:
    """The last names of the linear layers to adapt, the tensors of experts, and the layer indices unless all are."""
    head = model.get_output_embeddings()
    linear = [name for name, module in model.named_modules() if _is_linear(module) and module is not head]
    of_experts = _expert_tensors(model)
    if not linear and not of_experts:
        raise ConfigError(
            f"{type(model).__name__} has no linear layers that an adapter could be added to.",
            remedy="Train the whole model: without [trainer.lora], and with another bridge than lora.",
        )
    last = [name.rpartition(".")[2] for name in of_experts]
    present = sorted(set(map(_target, linear)))
    lost = _lost(model, present) if of_experts else []
    free = [name for name in present if name not in lost]
    if options.targets == "all-linear":
        if lost:
            raise ConfigError(
                f'trainer.lora.targets = "all-linear" cannot adapt all linear layers of {type(model).__name__}: peft takes the names '
                f"{', '.join(lost)} for those of its experts, so linear layers of that name would be left out.",
                remedy=f"--set trainer.lora.targets={_listed([*free, *sorted(set(last))])} adapts the others, and the experts.",
            )
        targets, experts = free, of_experts
    else:
        if unknown := [one for one in options.targets if one not in free and one not in last]:
            raise ConfigError(
                f"trainer.lora.targets names {', '.join(map(repr, unknown))}, but {type(model).__name__} has no such linear layer"
                f" to adapt (the head is not one). Choose from: {', '.join(sorted({*free, *last}))}."
            )
        targets = [one for one in options.targets if one in free]
        experts = [name for name, own in zip(of_experts, last, strict=True) if own in options.targets]
    if options.layers is None:
        return targets, sorted({name.partition(_numbered(name))[2] for name in experts}), None
    indices = {int(found[1]) for name in linear if (found := _LAYER.search(name))}
    if beyond := [layer for layer in options.layers if layer not in indices]:
        raise ConfigError(
            f"trainer.lora.layers names {', '.join(map(str, beyond))}, but {type(model).__name__} has layers"
            f" {min(indices)} to {max(indices)}."
            if indices
            else f"trainer.lora.layers is set, but {type(model).__name__} has no numbered layers."
        )
    return targets, [name for name in experts if int(_number(name)) in options.layers], sorted(options.layers)


def _target(name: str) -> str:
    """The name by which peft finds this layer: the last of its path, or the last two if that is a number."""
    *_, before, last = ".", *name.split(".")
    return f"{before}.{last}" if last.isdecimal() else last


def _is_linear(module: nn.Module) -> bool:
    """Return True for a linear layer. Routers have other classes, and are not adapted."""
    kind = type(module)
    return kind is nn.Linear or kind is Conv1D or kind.__name__ == "FalconLinear"


def _expert_tensors(model: PreTrainedModel) -> list[str]:
    """The parameters that hold a matrix for each expert of a layer."""
    config = model.config.get_text_config(decoder=True)
    counts = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
    number = next((int(found) for name in counts if isinstance(found := getattr(config, name, None), int)), 0)
    return [
        name
        for name, parameter in model.named_parameters()
        if number and parameter.ndim == 3 and len(parameter) == number and _LAYER.search(name)
    ]


def _lost(model: PreTrainedModel, names: list[str]) -> list[str]:
    """Those of these names of linear layers that peft, which has rules for files of transformers 4, takes for experts'."""
    config = LoraConfig(target_modules=list(names))
    convert_peft_config_for_transformers(config, model, None)
    return sorted(set(names) - set(config.target_modules or ()))


def _numbered(name: str) -> str:
    found = _LAYER.search(name)
    assert found is not None, "tensors of experts are in numbered layers"
    return found[0]


def _number(name: str) -> str:
    return _numbered(name).strip(".")


def _listed(names: list[str]) -> str:
    return f"[{','.join(names)}]" if not names else "'[" + ",".join(f'"{name}"' for name in names) + "]'"

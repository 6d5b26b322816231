"""The layers of a model that an adapter of a client adapts: parts of what the trainer's own adapter does, and the head."""

from __future__ import annotations

import re
from typing import Any

from peft import LoraConfig, PeftModel
from peft.tuners.lora import LoraLayer, ParamWrapper

from atropos_core.errors import DataError
from atropos_core.stepwise import AdapterSettings
from atropos_trainer_grpo.lora import NAME

MLP = re.compile(r"(^|[._])(mlp|ffn|ff|feed_forward|experts?|moe|fc\d|w\d)([._]|$)")  # in the path of a layer
MOST_RANK = 512  # of vLLM


def lora_config(model: PeftModel, settings: AdapterSettings) -> LoraConfig:
    """Return peft's configuration of an adapter. Raises DataError if it would adapt nothing."""
    own: Any = model.peft_config[NAME]
    base: Any = model.get_base_model()
    head = base.get_output_embeddings()
    linear = [
        name
        for name, module in base.named_modules()
        if isinstance(module, LoraLayer) and not isinstance(module, ParamWrapper) and module is not head
    ]
    chosen = [name for name in linear if (settings.mlp if _is_mlp(name) else settings.attention)]
    targets = _target_names(chosen, [name for name, _ in base.named_modules()])
    if settings.head:
        targets += [name for name, module in base.named_modules() if module is head]
    experts = sorted(own.target_parameters or ()) if settings.mlp else []
    if not targets and not experts:
        raise DataError(
            f"the adapter would change no layer of {type(base).__name__}.",
            remedy="Set at least one of attention, mlp and head that the model has.",
        )
    return LoraConfig(
        task_type="CAUSAL_LM",
        base_model_name_or_path=own.base_model_name_or_path,
        r=settings.rank,
        lora_alpha=settings.alpha,  # type: ignore[arg-type] # peft types it as an int, and only divides it by the rank
        target_modules=targets,
        target_parameters=experts or None,
    )


def _is_mlp(name: str) -> bool:
    return MLP.search(name) is not None


def _target_names(chosen: list[str], present: list[str]) -> list[str]:
    """Return the last names of the chosen layers, as peft and vLLM know them, if these mean no other layer; else their paths."""
    last = {name.rpartition(".")[2] for name in chosen}
    meant = [name for name in present if name.rpartition(".")[2] in last]
    return sorted(last) if meant == chosen and not any(name.isdecimal() for name in last) else list(chosen)

"""The routers of a mixture of experts, which engines record and trainers watch and replay."""

from __future__ import annotations

from typing import Any

from torch import nn


def routers_of(model: Any) -> list[nn.Module]:
    """Return the routers of a transformers model, by layer: modules that return logits [T, E], weights [T, k] and the experts' numbers
    [T, k], and ZAYA's also a state. Empty if it has none, or others."""
    recorder = (getattr(model.base_model, "_can_record_outputs", None) or {}).get("router_logits")
    if isinstance(recorder, list):  # several kinds of router
        return []
    if recorder is None or recorder.index != 0:  # logits come second from Llama 4's, which return no numbers
        return []
    kind = recorder.target_class
    return [module for module in model.modules() if isinstance(module, kind)]

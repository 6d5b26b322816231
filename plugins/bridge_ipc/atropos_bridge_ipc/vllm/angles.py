"""The cosines and sines of vLLM's rotary layers, at the positions that the trainer compares."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from atropos_bridge_ipc import rotary
from atropos_bridge_ipc.vllm.names import Names


def tables(model: nn.Module, config: Any, names: Names) -> list[dict[str, Any]]:
    """One entry for each distinct table, as rotary.check wants it."""
    made: dict[int, dict[str, Any]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, names.rotary):
            if id(module) not in made:
                made[id(module)] = _entry(module, config.model_config.max_model_len)
                made[id(module)]["settings"] = str(getattr(config.model_config.hf_config, "rope_parameters", ""))
            made[id(module)]["layers"].append(path)
    return list(made.values())


def _entry(module: Any, length: int) -> dict[str, Any]:
    table: torch.Tensor = module.cos_sin_cache  # [positions, rotary_dim]: cosines, then sines
    positions = rotary.sampled(min(len(table), length) - 1)
    cos, sin = table[positions].detach().float().cpu().chunk(2, dim=-1)
    return {
        "layers": [],
        "kind": type(module).__name__,
        "rotary_dim": int(module.rotary_dim),
        "eps": torch.finfo(table.dtype).eps,
        "positions": positions,
        "cos": cos.contiguous().numpy().tobytes(),
        "sin": sin.contiguous().numpy().tobytes(),
    }

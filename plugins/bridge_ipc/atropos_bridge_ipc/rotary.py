"""Check that the engine's rotary embedding (RoPE) has the same angles as the trainer's model.

Weights cannot show this: two models that differ only in their rotary base agree in every tensor. So the engine's table
of cosines and sines is compared with what the trainer's own rotary module computes, at a set of positions that includes
the first and the last.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from atropos_core.errors import WeightsMismatch

ROUNDINGS = 8  # allowed: of the table's own dtype, and of each angle in float32
_EPS32 = 2.0**-23


def sampled(last: int) -> list[int]:
    """Positions to compare at, of a table that is used up to `last`."""
    return sorted({p for p in (0, 1, 2, 3, last // 4, last // 2, last - 1, last) if 0 <= p <= last})


def check(model: nn.Module, offered: Sequence[Mapping[str, Any]]) -> None:
    """Raise WeightsMismatch unless the model's rotary modules give what the engine's tables hold. Each entry of
    `offered` has `layers` (module paths), `kind`, `rotary_dim`, `eps` (of its dtype), `positions`, and `cos` and `sin`
    as float32 bytes [positions, rotary_dim / 2]."""
    found = {name: module for name, module in model.named_modules() if _turns(module)}
    if bool(found) != bool(offered):
        raise WeightsMismatch(
            f"the trainer's model has {len(found)} rotary modules, and the engine's {len(offered)}: one has no rotary positions."
        )
    for entry in offered:
        for layer in entry["layers"]:
            _check_layer(model, _nearest(found, layer), layer, entry)


def check_fresh(model: nn.Module) -> None:
    """Raise WeightsMismatch unless each rotary module holds the same values as a new one built from its config."""
    for name, module in model.named_modules():
        if not _turns(module) or "config" not in inspect.signature(type(module).__init__).parameters:
            continue
        fresh = type(module)(config=module.config)  # on the CPU
        for leaf, expected in fresh.named_buffers():
            mine = module.get_buffer(leaf).cpu()
            if mine.shape != expected.shape or not torch.allclose(mine, expected, rtol=ROUNDINGS * _EPS32, atol=0.0):
                raise WeightsMismatch(
                    f"rotary buffer '{name}.{leaf}' is {_few(mine)}, and its configuration gives {_few(expected)}.",
                    remedy="The trainer's model was not built from its own config.json.",
                )


def _turns(module: nn.Module) -> bool:
    return any(leaf.endswith("inv_freq") for leaf in module._buffers)


def _nearest(found: Mapping[str, nn.Module], layer: str) -> nn.Module:
    """The rotary module that shares the longest path with a layer."""

    def shared(name: str) -> int:
        pairs = zip(name.split("."), layer.split("."), strict=False)
        return next((i for i, (a, b) in enumerate(pairs) if a != b), 0)

    return found[max(found, key=shared)]


def _check_layer(model: Any, module: nn.Module, layer: str, entry: Mapping[str, Any]) -> None:
    positions = np.array(entry["positions"])
    cos, sin = _table(module, positions, _layer_type(model, layer))
    width = entry["rotary_dim"]
    if cos.shape[1] * 2 != width:
        raise WeightsMismatch(
            f"rotary positions of {layer!r}: the trainer turns {cos.shape[1] * 2} dimensions of each head, the engine {width}."
            + _settings(model, entry)
        )
    scale = np.hypot(cos[0], sin[0])
    speeds = np.abs(np.arctan2(sin[1], cos[1])) if len(positions) > 1 else np.zeros_like(scale)  # radians a position
    allowed = scale * (ROUNDINGS * entry["eps"] + ROUNDINGS * _EPS32 * positions[:, None] * speeds)
    for what, ours in (("cos", cos), ("sin", sin)):
        theirs = np.frombuffer(entry[what], np.float32).reshape(len(positions), width // 2).astype(np.float64)
        excess = np.abs(ours - theirs) - allowed
        if (worst := float(excess.max())) > 0 or np.isnan(worst):
            at, frequency = np.unravel_index(np.nanargmax(excess), excess.shape)
            raise WeightsMismatch(
                f"rotary positions of {layer!r} differ: at position {positions[at]}, frequency {frequency}, {what} is"
                f" {ours[at, frequency]:.7f} in the trainer and {theirs[at, frequency]:.7f} in the engine"
                f" ({np.count_nonzero(~(excess <= 0))} of {excess.size} differ)." + _settings(model, entry)
            )


def _table(module: Any, positions: np.ndarray, layer_type: str | None) -> tuple[np.ndarray, np.ndarray]:
    """float64 [positions, rotary_dim / 2] each, of the trainer's own module."""
    device = next(module.buffers()).device
    keywords = {"layer_type": layer_type} if "layer_type" in inspect.signature(module.forward).parameters else {}
    with torch.no_grad():
        made = module(
            torch.zeros(1, 1, 1, device=device), torch.from_numpy(positions).to(device)[None].long(), **keywords
        )
    cos, sin = (table[0].double().cpu().numpy() for table in made)
    half = cos.shape[1] // 2
    if np.array_equal(cos[:, :half], cos[:, half:]):
        return cos[:, :half], sin[:, :half]
    return cos[:, ::2], sin[:, ::2]  # pairs of neighbours turn together


def _layer_type(model: Any, layer: str) -> str | None:
    kinds = getattr(model.config, "layer_types", None) if hasattr(model, "config") else None
    number = re.search(r"\.(\d+)\.", layer)
    return kinds[int(number[1])] if kinds and number else None


def _settings(model: Any, entry: Mapping[str, Any]) -> str:
    mine = getattr(getattr(model, "config", None), "rope_parameters", None)
    return f"\n  trainer: {mine}\n  engine:  {entry['kind']} {entry.get('settings', '')}".rstrip()


def _few(tensor: torch.Tensor) -> str:
    return (
        f"{tensor.dtype} {list(tensor.shape)} {[float(f'{value:.6g}') for value in tensor.flatten()[:3].tolist()]}..."
    )

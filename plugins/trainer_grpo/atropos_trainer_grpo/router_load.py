"""How a mixture of experts routes the tokens that it is trained on: the share of the busiest expert, and the entropy of the routers."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from atropos_core.types import Metrics
from atropos_torch_models.routers import routers_of
from atropos_trainer_grpo.process_group import ProcessGroup


class RouterLoad:
    """Sums over the forward passes that compute a gradient. They stay on the device until `metrics`."""

    def __init__(self, routers: list[nn.Module]) -> None:
        self._sums: dict[int, Tensor] = {}  # of a layer: [E + 2] how often each expert was chosen, entropy, tokens
        for layer, router in enumerate(routers):
            router.register_forward_hook(partial(self._count, layer))

    def clear(self) -> None:
        self._sums = {}

    def metrics(self, group: ProcessGroup) -> Metrics:
        """Return the means over layers since `clear`, or nothing if no gradient was computed, which all ranks do or none. Collective."""
        if not self._sums:
            return {}
        sums = group.sum(torch.stack([self._sums[layer] for layer in sorted(self._sums)]).double().cpu())
        chosen, entropy, tokens = sums[:, :-2], sums[:, -2], sums[:, -1]
        return {
            "router/busiest_share": float((chosen.max(-1).values / chosen.sum(-1)).mean()),
            "router/entropy": float((entropy / tokens).mean()),
        }

    def _count(self, layer: int, router: nn.Module, given: Any, made: tuple[Tensor, ...]) -> None:
        if torch.is_grad_enabled():
            self._add(layer, made[0], made[2])

    @torch.no_grad()
    def _add(self, layer: int, logits: Tensor, chosen: Tensor) -> None:
        logs = logits.float().log_softmax(-1)
        sums = logs.new_zeros(logits.shape[-1] + 2)
        sums.scatter_add_(0, chosen.reshape(-1), logs.new_ones(chosen.numel()))
        sums[-2], sums[-1] = -(logs.exp() * logs).sum(), len(logits)
        self._sums[layer] = self._sums[layer] + sums if layer in self._sums else sums


def router_load(model: Any) -> RouterLoad | None:
    """Watch the routers of a transformers model; None if it has none that return logits, weights and chosen experts."""
    routers = routers_of(model)
    return RouterLoad(routers) if routers else None

"""One adapter of a client: its parameters, the gradient that was added up, and Adam's moments."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict

import torch
from torch import Tensor
from torch.nn import Parameter

from atropos_core.errors import DataError, TrainingDiverged
from atropos_core.stepwise import AdamSettings
from atropos_core.types import Metrics

MOMENTS = ("exp_avg", "exp_avg_sq")
STEP = "step"


class Adapter:
    """`key` is its name in peft's model. Its parameters are in fp32; their names are those of its saved tensors."""

    def __init__(self, key: str, parameters: Mapping[str, Parameter]) -> None:
        self.key = key
        self.parameters = parameters
        self._gradient: list[Tensor] | None = None
        self._adam = torch.optim.AdamW(parameters.values(), fused=True)

    def clear_gradient(self) -> None:
        self._gradient = None

    def take_gradient(self) -> list[Tensor]:
        """Return what the backward passes of one call left in the parameters, and leave nothing there."""
        taken = [torch.zeros_like(one) if one.grad is None else one.grad for one in self.parameters.values()]
        self.leave_gradient()
        return taken

    def leave_gradient(self) -> None:
        """Leave no gradient in the parameters."""
        for parameter in self.parameters.values():
            parameter.grad = None

    def add(self, gradient: list[Tensor]) -> None:
        """Add the gradient of one call. Raises TrainingDiverged, and adds nothing, if an entry of the sum is not finite."""
        total = gradient if self._gradient is None else list(torch._foreach_add(self._gradient, gradient))
        if not torch.isfinite(torch.nn.utils.get_total_norm(total, math.inf)):
            raise TrainingDiverged(
                "the gradient of this call, or its sum with that of earlier ones, has entries that are not finite numbers.",
                remedy="Give smaller weights, advantages or logprobs; or restore the adapter from a state before its weights grew.",
            )
        self._gradient = total

    @torch.no_grad()
    def step(self, adam: AdamSettings) -> Metrics:
        """Take one step of AdamW (arXiv 1711.05101), and clear the gradient. Raises DataError or TrainingDiverged before anything has
        changed."""
        _check(adam)
        gradient = self._gradient or [torch.zeros_like(one) for one in self.parameters.values()]
        norm = torch.nn.utils.get_total_norm(gradient)
        if not torch.isfinite(norm):
            raise TrainingDiverged(
                "the squares of the gradient's entries add up to more than a float holds.",
                remedy="Clear the gradient, and give smaller weights or advantages.",
            )
        for parameter, one in zip(self.parameters.values(), gradient, strict=True):
            parameter.grad = one
        if adam.max_grad_norm:
            torch.nn.utils.clip_grads_with_norm_(self.parameters.values(), adam.max_grad_norm, norm)
        (group,) = self._adam.param_groups
        group |= {
            "lr": adam.learning_rate, "betas": (adam.beta1, adam.beta2), "eps": adam.eps, "weight_decay": adam.weight_decay,
        }  # fmt: skip
        self._adam.step()
        self.leave_gradient()
        self.clear_gradient()
        return {"grad_norm": float(norm)}

    def moments(self) -> dict[str, Tensor]:
        """Return Adam's state, which is zero before the first step."""
        made: dict[str, Tensor] = {}
        for name, parameter in self.parameters.items():
            state = self._adam.state.get(parameter, {})  # `[]` would add one
            made[f"{STEP}.{name}"] = state.get(STEP, torch.zeros(())).reshape(1).cpu()
            made |= {f"{kind}.{name}": state.get(kind, torch.zeros_like(parameter)).contiguous() for kind in MOMENTS}
        return made

    def load_moments(self, saved: Mapping[str, Tensor]) -> None:
        """Load what `moments` returned for parameters of these names and shapes."""
        state = {
            place: {
                STEP: saved[f"{STEP}.{name}"].reshape(()),
                **{kind: saved[f"{kind}.{name}"] for kind in MOMENTS},
            }
            for place, name in enumerate(self.parameters)
        }
        self._adam.load_state_dict({**self._adam.state_dict(), "state": state})


def _check(adam: AdamSettings) -> None:
    for name, value in asdict(adam).items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
            raise DataError(
                f"{name} of the optimizer step is {value!r:.100}: it must be a finite number of at least 0."
            )
    for name in ("beta1", "beta2"):
        if getattr(adam, name) >= 1:
            raise DataError(f"{name} of the optimizer step is {getattr(adam, name)}: it must be below 1.")
    if adam.eps == 0:
        raise DataError("eps of the optimizer step is 0: a parameter without a gradient would become NaN.")

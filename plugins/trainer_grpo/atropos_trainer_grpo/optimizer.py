"""AdamW that updates parameters in place, with moments in fp32 or in torchao's 8 or 4 bits.

Parameters may be views of memory that an engine reads (a bridge put them there), so they are never replaced. A 16-bit parameter is the
rounding of an fp32 master, which Adam updates and where gradients add up. With `optimizer_offloading` every parameter has a master in host
memory. Its gradient and moments are also there, and Adam runs there.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import Parameter

from atropos_core.errors import CheckpointError
from atropos_trainer_grpo.learning_rates import ParameterGroup, parameter_groups, schedule_factor
from atropos_trainer_grpo.process_group import full, local

if TYPE_CHECKING:
    from atropos_trainer_grpo.config import GrpoOptions


MOMENTS = {"step", "exp_avg", "exp_avg_sq"}  # of each parameter, in every AdamW here
TORCHAO = {"adamw_8bit": "AdamW8bit", "adamw_4bit": "AdamW4bit", "adamw_fp8": "AdamWFp8"}


class Optimizer:
    """AdamW with a schedule, rates by parameter, and a bound on the global gradient norm. `in_all` is the number of updates
    in the run, for schedules that fall.

    During supervised steps, `supervised_rate` replaces the trainer's rate and its schedule. The first other update begins anew: without
    their moments, and with the first rate of the schedule."""

    def __init__(self, named: Iterable[tuple[str, Parameter]], options: GrpoOptions, in_all: int = 0) -> None:
        trained = {name: parameter for name, parameter in named if parameter.requires_grad}
        self.parameters = list(trained.values())
        self.updates = 0  # without supervised ones
        self.supervised_rate: float | None = None
        self._options = options
        self._in_all = in_all
        self._masters = [self._master(parameter) for parameter in self.parameters]
        self.adopt()
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(self._collector(master)) for parameter, master in self._apart()
        ]
        groups: dict[ParameterGroup, list[int]] = {}
        chosen = parameter_groups({name: parameter.ndim for name, parameter in trained.items()}, options)
        for place, name in enumerate(trained):
            groups.setdefault(chosen[name], []).append(place)
        self._groups = list(groups)
        self._order = [place for positions in groups.values() for place in positions]  # of the parameters in AdamW
        self._adam = _adam(
            options,
            [
                {
                    "params": [self._masters[place] for place in positions],
                    "weight_decay": options.weight_decay * group.decays,
                }
                for group, positions in groups.items()
            ],
        )

    @torch.no_grad()
    def adopt(self) -> None:
        """Copy the parameters' present values into the masters."""
        for parameter, master in self._apart():
            master.copy_(parameter)

    @property
    def learning_rate(self) -> float:
        """The rate of the next update, for parameters without a separate rate."""
        if self.supervised_rate is not None:
            return self.supervised_rate
        return self._options.learning_rate * schedule_factor(self._options, self.updates, self._in_all)

    def end_supervised(self) -> None:
        """Begin anew after supervised steps, if there were any."""
        if self.supervised_rate is not None:
            self.supervised_rate = None
            self._adam.state.clear()

    def clear(self) -> None:
        """Forget all gradients."""
        for tensor in (*self.parameters, *self._masters):
            tensor.grad = None

    def gradient_norm(self) -> Tensor:
        """The global L2 norm of the gradients added up since `clear`; a scalar, still on the device."""
        gradients = [tensor.grad for tensor in self.holders() if tensor.grad is not None]
        if not gradients:
            return torch.zeros(())
        return torch.nn.utils.get_total_norm(gradients).to(self.parameters[0].device)

    @torch.no_grad()
    def scale_down(self) -> tuple[float, Tensor]:
        """Scale a gradient whose entries are finite but whose squares are not to the norm that `step` allows.

        Returns the norms before and after. If an entry is not finite, nothing changes, and both norms are not finite either.
        """
        gradients = [tensor.grad for tensor in self.holders() if tensor.grad is not None]
        largest = float(full(torch.nn.utils.get_total_norm(gradients, math.inf)))
        if not math.isfinite(largest):
            return largest, torch.tensor(largest)
        torch._foreach_div_(gradients, largest)
        norm, allowed = float(full(self.gradient_norm())), self._options.max_grad_norm
        torch._foreach_mul_(gradients, allowed / norm)
        return largest * norm, torch.tensor(allowed)

    def not_finite(self) -> Tensor:
        """The number of entries in this rank's parameters that are not finite."""
        return torch.stack([(~torch.isfinite(local(tensor.detach()))).sum() for tensor in self.parameters]).sum()

    @torch.no_grad()
    def step(self, norm: Tensor) -> None:
        """Update in place; `norm` comes from `gradient_norm`."""
        holders = self.holders()
        torch.nn.utils.clip_grads_with_norm_(holders, self._options.max_grad_norm, norm)
        for holder, master in zip(holders, self._masters, strict=True):
            master.grad = holder.grad
        rate, now = self.supervised_rate, 1.0
        if rate is None:
            rate, now = self._options.learning_rate, schedule_factor(self._options, self.updates, self._in_all)
        for group, of in zip(self._adam.param_groups, self._groups, strict=True):
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(of.rate(rate) * now)
            else:
                group["lr"] = of.rate(rate) * now
        self._adam.step()
        for parameter, master in self._apart():
            parameter.copy_(master)
        self.updates += self.supervised_rate is None
        self.clear()

    def state(self) -> dict[str, Any]:
        """Everything except the parameters that the next update depends on: tensors, numbers and containers."""
        masters = [
            master if master.dtype != parameter.dtype else None
            for parameter, master in zip(self.parameters, self._masters, strict=True)
        ]
        moments = {self._order[place]: entry for place, entry in self._adam.state_dict()["state"].items()}
        supervised = {} if self.supervised_rate is None else {"supervised_rate": self.supervised_rate}
        state = {"optimizer": self._options.optimizer, "updates": self.updates, "masters": masters, "moments": moments}
        return state | supervised

    def refuse_other(self, state: Mapping[str, Any]) -> None:
        """Raise CheckpointError if the moments of a `state` are in another format than this optimiser's, and ValueError if no optimiser
        here has their format."""
        saved_by = state.get("optimizer", "adamw")
        if saved_by not in ("adamw", *TORCHAO):
            raise ValueError(f"its optimizer is {saved_by!r:.100}")
        if saved_by != self._options.optimizer:
            raise CheckpointError(
                f'the moments of this checkpoint are those of trainer.optimizer = "{saved_by}", and this run has '
                f'"{self._options.optimizer}".',
                remedy=f"Set trainer.optimizer={saved_by}.",
            )

    def refuse_other_form(self, state: Mapping[str, Any]) -> None:
        """Raise ValueError if a `state` does not fit these parameters: torch would take it up, and fail or go wrong at the next update."""
        if type(state["updates"]) is not int or state["updates"] < 0:
            raise ValueError(f"its count of updates is {state['updates']!r:.100}")
        if not isinstance(state.get("supervised_rate"), float | None):
            raise ValueError(f"its rate of supervised steps is {state['supervised_rate']!r:.100}")
        for at, (saved, master) in enumerate(zip(state["masters"], self._masters, strict=True)):
            if saved is not None or master.dtype != self.parameters[at].dtype:
                _refuse_other_tensor(f"master {at}", saved, master.shape)
        for at, entry in state["moments"].items():
            if type(at) is not int or not 0 <= at < len(self._masters) or entry.keys() != MOMENTS:
                raise ValueError(f"it has the moments {sorted(map(str, entry))} of a parameter {at!r:.100}")
            for name, saved in entry.items():
                _refuse_other_tensor(
                    f"{name} of parameter {at}", saved, self._masters[at].shape if name != "step" else torch.Size()
                )

    @torch.no_grad()
    def load(self, state: Mapping[str, Any]) -> None:
        """Load a `state` of parameters with these shapes in this order."""
        self.updates = state["updates"]
        self.supervised_rate = state.get("supervised_rate")
        for master, saved in zip(self._masters, state["masters"], strict=True):
            if saved is not None:
                master.copy_(saved)
        moments = {at: state["moments"][place] for at, place in enumerate(self._order) if place in state["moments"]}
        self._adam.load_state_dict({**self._adam.state_dict(), "state": moments})
        self.clear()

    @torch.no_grad()
    def take_over(self, before: Optimizer) -> None:
        """Continue from an optimiser of the same parameters in other storage. A master stays exact if its rounding is the
        present value of its parameter."""
        present = [master.clone() for _, master in self._apart()]
        self.load(before.state())
        for (parameter, master), now in zip(self._apart(), present, strict=True):
            kept = master.to(parameter.dtype) == now.to(parameter.dtype)
            master.copy_(torch.where(kept, master, now))

    def close(self) -> None:
        """Release the parameters; may be called twice."""
        self.clear()
        for hook in self._hooks:
            hook.remove()

    def holders(self) -> list[Tensor]:
        """The tensors in whose `grad` gradients add up: the parameters or their fp32 masters."""
        return [
            master if self._has_own(parameter) else parameter
            for parameter, master in zip(self.parameters, self._masters, strict=True)
        ]

    def _has_own(self, parameter: Tensor) -> bool:
        """True if its master is a separate tensor."""
        return self._options.optimizer_offloading or parameter.element_size() == 2

    def _master(self, parameter: Tensor) -> Tensor:
        if not self._has_own(parameter):
            return parameter.detach()
        if not self._options.optimizer_offloading:
            return torch.empty_like(parameter, dtype=torch.float32)
        return torch.empty(parameter.shape, dtype=torch.float32, pin_memory=parameter.is_cuda)

    def _apart(self) -> list[tuple[Parameter, Tensor]]:
        """The parameters with separate masters."""
        pairs = zip(self.parameters, self._masters, strict=True)
        return [(parameter, master) for parameter, master in pairs if self._has_own(parameter)]

    @staticmethod
    def _collector(master: Tensor) -> Any:
        def collect(parameter: Tensor) -> None:
            gradient = parameter.grad
            parameter.grad = None
            if gradient is None:
                return
            gradient = gradient.to(master.device)
            master.grad = gradient.float() if master.grad is None else master.grad.add_(gradient)

        return collect


def _refuse_other_tensor(name: str, saved: object, shape: torch.Size) -> None:
    if not isinstance(saved, Tensor) or not saved.is_floating_point() or saved.shape != shape:
        found = f"{saved.dtype} {list(saved.shape)}" if isinstance(saved, Tensor) else f"{saved!r:.100}"
        raise ValueError(f"{name} is {found}, and the parameter needs floats of the shape {list(shape)}")


def _adam(options: GrpoOptions, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    rest: dict[str, Any] = {"lr": options.learning_rate, "betas": options.betas, "eps": options.eps}
    if options.optimizer == "adamw":
        return torch.optim.AdamW(groups, **rest, fused=True)  # one kernel, 1 ms for 0.8 M parameters in 46 tensors
    from torchao import optim

    made: torch.optim.Optimizer = getattr(optim, TORCHAO[options.optimizer])(groups, **rest)
    return made

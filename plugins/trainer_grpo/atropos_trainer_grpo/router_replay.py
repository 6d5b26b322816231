"""Router replay: the trainer computes a mixture of experts with the experts that the engine chose (R3, arXiv:2510.11370).

A router's choice jumps where two experts are about equally likely. Engine and trainer round differently, so that they choose other
experts for some tokens, and the logprobs of these are far apart though the weights are the same. With replay, the trainer's routers
weigh the experts that the engine recorded (`Rollout.experts`). The weights still come from the trainer's own logits, by each model's own
formula, and have a gradient: only the choice is replaced, by answering the `torch.topk` that a router makes it with.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from atropos_core.errors import DataError, FitError
from atropos_core.types import EXPERTS, Batch, Metrics
from atropos_torch_models.routers import routers_of
from atropos_trainer_grpo.process_group import ProcessGroup

Indices = NDArray[np.int64]
TOP_K = (torch.topk, torch.Tensor.topk)
OFF = "set trainer.router_replay = false"
NO_ROUTERS = "it has no routers that say which experts they choose"


@dataclass(frozen=True)
class Recorded:
    """The experts of N places of a forward pass."""

    numbers: Tensor  # [N, L, k] whole numbers, of the layers that have routers
    known: Tensor  # bool[N] elsewhere the router chooses
    highest: int  # the largest of the numbers


class RouterReplay:
    """Replaces what the routers of a transformers model choose. `recorded` is set before each forward pass and stays until the next, since
    the backward pass of a checkpointed layer routes again."""

    def __init__(self, model: Any) -> None:
        """Raises FitError for a model without routers that can be replayed."""
        self.recorded: Recorded | None = None
        self._routers = routers_of(model)
        if not self._routers:
            raise FitError(
                f"trainer.router_replay is not possible for a model of type {model.config.model_type!r}: {NO_ROUTERS}.",
                remedy=f"{OFF.capitalize()}.",
            )
        names = {id(module): name for name, module in model.named_modules()}
        self._layers = [_layer_in(names[id(router)]) for router in self._routers]
        self._all_layers = int(model.config.get_text_config(decoder=True).num_hidden_layers)
        self._experts: dict[int, int] = {}  # of a router: how many it chooses from
        self._agreed: list[
            Tensor
        ] = []  # f64[2] by pass with a gradient: recorded experts that routers would choose too, and all
        for number, router in enumerate(self._routers):
            router.forward = partial(self._route, number, router.forward)

    def of(
        self, batch: Batch, positions: Indices, slots: Indices, places: int, device: str | torch.device
    ) -> Recorded | None:
        """Return what is recorded of the tokens at these positions [T] of the batch, which stand at `slots` [T] of a pass over so many
        places. Where several share a place, as those of a prompt do, the last counts. None without any. Raises DataError for experts of
        another model."""
        column = batch.columns.get(EXPERTS)
        if column is None:
            return None
        there = column.present[positions]
        numbers = np.zeros((places, *column.values.shape[1:]), column.values.dtype)
        known = np.zeros(places, np.bool_)
        numbers[slots[there]] = column.values[positions[there]]
        known[slots[there]] = True
        layers = self._layers_in(column.values)
        return Recorded(
            torch.from_numpy(numbers[:, layers]).to(
                device
            ),  # a layer at a time becomes int64, which is eight times as large
            torch.from_numpy(known).to(device),
            int(numbers.max(initial=0)),
        )

    def clear(self) -> None:
        """Forget the passes that `metrics` counts."""
        self._agreed = []

    def metrics(self, batch: Batch, group: ProcessGroup) -> Metrics:
        """Return the share of the batch's tokens whose experts were recorded, without the last of each sequence, which no engine computes;
        and the share of recorded experts that the trainer's routers would choose too. Collective."""
        computed = np.ones(len(batch.tokens), np.bool_)
        computed[batch.offsets[1:] - 1] = False
        share = float(batch.columns[EXPERTS].present[computed].mean()) if computed.any() else 0.0
        both = torch.stack(self._agreed).sum(0).cpu() if self._agreed else torch.zeros(2, dtype=torch.float64)
        agreed, counted = group.sum(both).tolist()
        return {"router/replayed_share": share} | ({"router/agreement": agreed / counted} if counted else {})

    def _layers_in(self, experts: NDArray[Any]) -> list[int]:
        """Return the indices of the routers' layers in the column."""
        if experts.shape[1] == len(self._routers):
            return [*range(len(self._routers))]
        if experts.shape[1] == self._all_layers:  # vLLM counts layers without experts too
            return self._layers
        raise DataError(
            f"rollouts have recorded experts of {experts.shape[1]} layers, and the trainer's model has {len(self._routers)} routers in "
            f"{self._all_layers} layers.",
            remedy=f"Have the engine serve the model that is trained; or {OFF}.",
        )

    def _route(self, number: int, route: Callable[..., Any], *inputs: Any, **named: Any) -> Any:
        recorded = self.recorded
        if recorded is None:
            return route(*inputs, **named)
        if number not in self._experts:
            with torch.no_grad():
                self._experts[number] = int(route(*inputs, **named)[0].shape[-1])
        if recorded.highest >= self._experts[number]:
            raise DataError(
                f"rollouts have a recorded expert {recorded.highest}, and the trainer's model has {self._experts[number]} experts.",
                remedy=f"Have the engine serve the model that is trained; or {OFF}.",
            )
        experts = recorded.numbers[:, number].long()
        with _Choice(experts, recorded.known, self._experts[number]) as choice:
            made = route(*inputs, **named)
        if choice.own is None:
            kind = type(self._routers[number]).__name__
            raise FitError(
                f"a {kind} does not choose experts by topk, and cannot be replayed.", remedy=f"{OFF.capitalize()}."
            )
        if torch.is_grad_enabled():
            self._agreed.append(_agreement(choice.own, experts, recorded.known))
        return made


class _Choice(TorchFunctionMode):
    """Answers the `topk` by which a router chooses k of E experts for each of N tokens; and one before it, by which some routers choose
    among groups of experts: the groups of the given experts are among those that it chooses."""

    def __init__(self, experts: Tensor, known: Tensor, count: int) -> None:
        super().__init__()
        self._experts, self._known, self._count = experts, known, count  # i64[N, k], bool[N]
        self.own: Tensor | None = None  # i64[N, k] what the router would choose

    def __torch_function__(self, function: Any, types: Any, given: Any = (), named: Any = None) -> Any:
        made = function(*given, **(named or {}))
        if function not in TOP_K:
            return made
        scores, width = given[0], given[0].shape[-1]
        if scores.numel() != len(self._known) * width:  # experts within groups
            return made
        if width == self._count and made.indices.numel() == self._experts.numel():
            self.own = made.indices.reshape(self._experts.shape)
            chosen = torch.where(self._known[:, None], self._experts, self.own).view(made.indices.shape)
        elif width < self._count and self._count % width == 0:
            needed = torch.zeros_like(scores, dtype=torch.bool)
            needed.view(-1, width).scatter_(
                1, self._experts // (self._count // width), self._known[:, None].expand_as(self._experts)
            )
            chosen = scores.masked_fill(needed, torch.inf).topk(made.indices.shape[-1], dim=-1).indices
        else:
            return made
        return torch.return_types.topk((scores.gather(-1, chosen), chosen))


@torch.no_grad()
def _agreement(own: Tensor, recorded: Tensor, known: Tensor) -> Tensor:
    same = (recorded[:, :, None] == own[:, None, :]).any(-1) & known[:, None]
    return torch.stack([same.sum(), known.sum() * recorded.shape[1]]).double()


def replay_of(model: nn.Module) -> RouterReplay | None:
    """The replay that was attached to this transformers model, if any."""
    replay: RouterReplay | None = vars(model).get("router_replay")
    return replay


def attach_replay(model: Any) -> RouterReplay:
    """Have `score` replay experts in this transformers model. Raises FitError if it has no routers."""
    model.router_replay = replay = RouterReplay(model)
    return replay


def difference(model: Any) -> float | str:
    """Measure on a small copy of a model if its routers can be replayed. Return the largest difference of logits between its own choice and
    the replay of that, in units of their spread; or, as text, why they cannot be."""
    if not routers_of(model):
        return NO_ROUTERS
    tokens = torch.arange(3, 67)[None]
    known = torch.ones(tokens.numel(), dtype=torch.bool)
    replay = attach_replay(model)
    made: list[Any] = []
    hooks = [router.register_forward_hook(lambda router, given, out: made.append(out)) for router in routers_of(model)]

    def logits(recorded: Tensor | None) -> Tensor:
        made.clear()
        replay.recorded = None if recorded is None else Recorded(recorded, known, int(recorded.max()))
        found: Tensor = model(input_ids=tokens, use_cache=False).logits
        return found

    def routed() -> Tensor:
        return torch.stack([out[2].reshape(tokens.numel(), -1) for out in made], dim=1)

    try:
        with torch.no_grad():
            own = logits(None)
            experts = routed()
            again = logits(experts)
            others = experts.roll(
                1, 0
            )  # those of the token before: a choice that is possible, also among groups of experts
            logits(others)
            weighed = torch.equal(routed(), others) and all((out[1] != 0).all() for out in made)
            last = experts.clone()
            last[..., 0] = made[0][0].shape[-1] - 1
            logits(last)
            weighed &= torch.equal(
                routed(), last
            )  # false of a router that can also choose no expert, and calls that another number
    except FitError as error:
        return Exception.__str__(error).rstrip(".")
    finally:
        replay.recorded = None
        for hook in hooks:
            hook.remove()
    if not weighed:
        return "its routers do not weigh other experts than those that they choose"
    return float((again - own).abs().max() / own.std())


def _layer_in(name: str) -> int:
    """The number of the layer in a module's name."""
    found = re.search(r"\.(\d+)\.", f".{name}.")
    assert found is not None, name
    return int(found[1])

"""A model whose parameters are divided over ranks, by torch's FSDP2 (`fully_shard`).

Each layer gathers its parameters for its own forward and backward pass. Parameters outside of layers (embeddings, final
norm, head) are gathered around the whole pass, which is why scoring is one module here. If the model is 16-bit, shards
are fp32: they are the masters, and the gathered parameters are their rounding. Rank 0 also keeps the whole model, on the
CPU and in its own dtype, for bridges to read and checkpoints to hold.
"""

from __future__ import annotations

import copy
import socket
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as distributed
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from atropos_torch_models.network import use_the_way_to
from atropos_trainer_grpo.model import Scorer, language_model
from atropos_trainer_grpo.process_group import ProcessGroup, full, part


def join(group: ProcessGroup, host: str, port: int, device: str, listening: socket.socket | None = None) -> DeviceMesh:
    """Become a rank of this process's only group, which meets at rank 0's `host` and `port`. Returns once all have joined. Rank 0 brings
    the listening socket. Raises FitError."""
    use_the_way_to(host, port)
    kind = torch.device(device).type
    if kind == "cuda":
        torch.cuda.set_device(device)
    store = distributed.TCPStore(  # type: ignore[attr-defined] # torch does not list it
        host,
        port,
        group.size,
        is_master=group.rank == 0,
        wait_for_workers=False,
        master_listen_fd=None if listening is None else listening.detach(),
    )
    distributed.init_process_group(
        "gloo" if kind == "cpu" else "cpu:gloo,cuda:nccl", store=store, rank=group.rank, world_size=group.size
    )
    return init_device_mesh(kind, (group.size,))


def leave() -> None:
    if distributed.is_initialized():
        distributed.destroy_process_group()


class Sharded:
    """One model over all ranks. Everything here is collective."""

    def __init__(self, model: nn.Module, group: ProcessGroup, mesh: DeviceMesh, *, trained: bool = True) -> None:
        """Takes `model` over, unless this is rank 0: there `whole` remains."""
        short = {one.dtype for one in model.parameters() if one.requires_grad and one.element_size() == 2}
        self.whole = model if trained and group.rank == 0 else None
        self.stored = {name: parameter.dtype for name, parameter in model.named_parameters()}
        self.model = copy.deepcopy(model) if self.whole is not None else model
        policy = MixedPrecisionPolicy(cast_forward_inputs=False)  # temperatures stay fp32
        if short:
            self.model.float()
            policy = MixedPrecisionPolicy(short.pop(), torch.float32, cast_forward_inputs=False)
        self.scorer = Scorer(self.model)
        for layer in _layers(self.model):
            fully_shard(layer, mesh=mesh, mp_policy=policy)
        fully_shard(self.scorer, mesh=mesh, mp_policy=policy)
        for module in self.scorer.modules():
            if isinstance(module, FSDPModule):  # token weights are those of the whole minibatch: gradients add up
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)  # gloo has no other

    @torch.no_grad()
    def gather(self) -> None:
        """Bring rank 0's whole model up to date."""
        whole = dict(self.whole.named_parameters()) if self.whole is not None else None
        for name, parameter in self.model.named_parameters():
            if parameter.requires_grad:
                values = full(parameter)
                if whole is not None:
                    whole[name].copy_(values)

    @property
    def trained(self) -> dict[str, torch.Tensor]:
        """This rank's shards of the trained parameters, by name; those of 16-bit ones are masters."""
        return {name: one.detach() for name, one in self.model.named_parameters() if one.requires_grad}

    def masters(self) -> list[torch.Tensor | None]:
        """None for parameters that need none."""
        return [one if self.stored[name] != one.dtype else None for name, one in self.trained.items()]

    def divided(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """This rank's part of an optimiser's state that one process has saved."""
        trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        masters = [
            None if saved is None else part(parameter, saved)
            for parameter, saved in zip(trained, state["masters"], strict=True)
        ]
        moments = {
            place: {name: value if value.ndim == 0 else part(trained[place], value) for name, value in entry.items()}
            for place, entry in state["moments"].items()
        }
        return {**state, "masters": masters, "moments": moments}


def _layers(model: nn.Module) -> list[nn.Module]:
    """The decoder layers: what transformers itself would not split over devices."""
    names = set(language_model(model)._no_split_modules or ())
    return [module for module in model.modules() if type(module).__name__ in names]

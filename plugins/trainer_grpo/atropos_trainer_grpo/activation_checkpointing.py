"""Gradient checkpointing: which decoder layers are computed again in the backward pass, and whether their inputs are offloaded."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from atropos_core.errors import FitError
from atropos_trainer_grpo.host_memory import PIECE

if TYPE_CHECKING:
    from atropos_trainer_grpo.config import GrpoOptions


def enable(model: PreTrainedModel, options: GrpoOptions) -> None:
    """Have the first `checkpointed_layers` decoder layers keep only their inputs. The others keep all that the backward pass needs: it
    begins with them, and has freed their memory before the first layer is computed again. Raises FitError if the model has no such
    layers and one of the options concerns them."""
    switch = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)
    switch({"use_reentrant": False})  # the second name is that of transformers before 5.20
    layers: list[Any] = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not layers and (options.checkpointed_layers is not None or options.activation_offloading):
        raise FitError(
            f"{type(model).__name__} is not computed again layer by layer as transformers' newer models are.",
            remedy="Leave trainer.checkpointed_layers and trainer.activation_offloading out.",
        )
    for number, layer in enumerate(layers):
        if options.checkpointed_layers is not None and number >= options.checkpointed_layers:
            layer.gradient_checkpointing = False
        if options.activation_offloading:  # the attribute that transformers documents for a checkpointing function
            layer._gradient_checkpointing_func = checkpoint_in_host_memory


def checkpoint_in_host_memory(function: Callable[..., Any], *arguments: Any) -> Any:
    """Like torch's checkpoint, with its saved inputs in host memory. The hooks see only those: what `function` saves is computed again."""
    with saved_tensors_hooks(_to_host, _to_device):
        return checkpoint(function, *arguments, use_reentrant=False)


class _Offloaded(NamedTuple):
    device: torch.device
    shape: torch.Size
    dtype: torch.dtype
    pieces: list[Tensor]


def _to_host(tensor: Tensor) -> _Offloaded:
    on_gpu = tensor.device.type == "cuda"
    pieces = []
    for piece in tensor.reshape(-1).split(PIECE // tensor.element_size()):
        held = torch.empty(piece.shape, dtype=tensor.dtype, pin_memory=on_gpu)
        held.copy_(piece, non_blocking=on_gpu)  # in the order of the device's stream, as its way back
        pieces.append(held)
    return _Offloaded(tensor.device, tensor.shape, tensor.dtype, pieces)


def _to_device(saved: _Offloaded) -> Tensor:
    made = torch.empty(saved.shape, dtype=saved.dtype, device=saved.device)
    for part, piece in zip(made.view(-1).split(PIECE // saved.dtype.itemsize), saved.pieces, strict=True):
        part.copy_(piece, non_blocking=True)
    return made

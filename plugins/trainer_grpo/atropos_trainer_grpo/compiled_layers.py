"""Decoder layers compiled by torch.compile: their norms, rotary embeddings, gated MLPs and residual sums become a few kernels.

One compilation of a layer's class serves all its layers, because weights are inputs of the compiled code. Lengths are symbols in it, so a
batch of another length does not compile again. Attention stays as it is: its layout differs from batch to batch.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface
from transformers.modeling_layers import GradientCheckpointingLayer

from atropos_core.errors import FitError
from atropos_trainer_grpo.architecture import decoder
from atropos_trainer_grpo.attention import NAME, packed_attention

# Compilations of one function before torch leaves it as it is, with a warning: without and with gradients, a batch of one row or of
# several, and each kind of layer or of adapter.
VARIANTS = 32


def compile_layers(model: nn.Module) -> None:
    """Have the model compute its decoder layers by compiled code, which is made when they first run. Checkpointing of layers stays outside
    of it. Raises FitError if the model has no decoder layers of the usual kind."""
    layers = [module for module in decoder(model).modules() if isinstance(module, GradientCheckpointingLayer)]
    if not layers:
        raise FitError(
            f"trainer.compile_layers = true: {type(model).__name__} has no decoder layers of transformers' newer kind.",
            remedy="Set trainer.compile_layers = false.",
        )
    from torch._dynamo import config as compiling
    from torch._inductor import config as generating

    compiling.recompile_limit = max(compiling.recompile_limit, VARIANTS)
    generating.compile_threads = 1  # more are processes, which would outlive a trainer that is killed
    AttentionInterface.register(NAME, torch.compiler.disable(packed_attention))
    compiled: dict[type, Callable[..., Any]] = {}
    for layer in layers:
        kind = type(layer)
        if kind not in compiled:
            compiled[kind] = torch.compile(_own_forward(kind), dynamic=True)
        layer.forward = partial(_forward, layer, compiled[kind])


def refuse_without_compiler(device: str) -> None:
    """Raises FitError if torch.compile lacks what it needs on this device."""
    on_gpu = device.startswith("cuda")
    if on_gpu and importlib.util.find_spec("triton") is None:
        raise FitError(
            "trainer.compile_layers = true needs the module 'triton' on a GPU, and 'triton' is not installed.",
            remedy="pip install triton, or set trainer.compile_layers = false.",
        )
    if _compiler(on_gpu) is None:
        raise FitError(
            f"trainer.compile_layers = true needs a {'C' if on_gpu else 'C++'} compiler, and this machine has none.",
            remedy=f"Install {'gcc' if on_gpu else 'g++'}, or set trainer.compile_layers = false.",
        )


def _compiler(on_gpu: bool) -> str | None:
    """The program that Triton or torch calls."""
    setting, *programs = ("CC", "gcc", "clang", "cc") if on_gpu else ("CXX", "g++", "clang++", "c++")
    wanted = [os.environ[setting]] if os.environ.get(setting) else programs
    return next(filter(None, map(shutil.which, wanted)), None)


def _own_forward(kind: type[nn.Module]) -> Callable[..., Any]:
    """The layer's computation without checkpointing: newer transformers wrap `forward`, older ones `__call__`."""
    forward: Callable[..., Any] = kind.forward
    return vars(forward)["__wrapped__"] if _is_wrapped(kind) else forward


def _is_wrapped(kind: type[nn.Module]) -> bool:
    return kind.forward.__code__.co_name == "forward_with_checkpointing"


def _forward(layer: Any, compiled: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    if layer.gradient_checkpointing and layer.training and _is_wrapped(type(layer)):
        return layer._gradient_checkpointing_func(partial(compiled, layer, **named), *arguments)
    return compiled(layer, *arguments, **named)

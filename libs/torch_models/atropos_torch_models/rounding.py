"""Measure how far rounding can move a model's logprobs, with the model's own forward pass.

Two exact ways of computing with the same weights (a packed batch, a cache of keys and values, another kernel) round each
layer's output differently, and the layers above amplify that. To see by how much, a forward pass moves every layer's output
by one unit in the last place, up or down at random (Monte Carlo arithmetic: Parker, Pierce and Eggert, 2000). Unlike a pass in
float64, it needs no second copy of the weights.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from atropos_core.types import Floats


async def measured_rounding(model: nn.Module, logprobs: Callable[[], Awaitable[list[Floats]]]) -> float:
    """Return the largest change, in nats, of what `logprobs` computes with `model` when each layer rounds differently."""
    exact = await logprobs()
    with noise_of_rounding(model):
        moved = await logprobs()
    return max((float(np.abs(a - b).max(initial=0.0)) for a, b in zip(exact, moved, strict=True)), default=0.0)


@contextmanager
def noise_of_rounding(model: nn.Module) -> Iterator[None]:
    """Inside this context, the output of each layer of `model` that holds parameters is off by half an epsilon of its type, relatively."""
    generators: dict[torch.device, torch.Generator] = {}

    def moved(layer: Any, given: Any, output: Any) -> Any:
        if not isinstance(output, Tensor) or not output.is_floating_point():
            return output
        if output.device not in generators:  # a separate one, so that the run's other random numbers stay the same
            generators[output.device] = torch.Generator(output.device).manual_seed(0)
        drawn = torch.randint(0, 2, output.shape, generator=generators[output.device], device=output.device)
        return output + output * ((drawn * 2 - 1) * (torch.finfo(output.dtype).eps / 2))

    layers = [layer for layer in model.modules() if any(True for _ in layer.parameters(recurse=False))]
    hooks = [layer.register_forward_hook(moved) for layer in layers]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()

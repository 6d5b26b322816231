"""Compare the gradients of two updates. An extension in the trainer's process writes them before the optimizer takes them."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from atropos_core.interfaces import Trainer, WeightHolder
from atropos_core.processes.child import STEP_DEADLINE_S

EXTENSION = "atropos_debugging.gradients:GradientExtension"


class GradientExtension:
    """Writes the gradients that a model's trained parameters hold."""

    def __init__(self, holder: WeightHolder) -> None:
        self._holder = holder

    async def write(self, directory: str) -> list[str]:
        """Write each gradient as `NUMBER.npy`, and return the parameters' names. Empty if the parameters hold none: the trainer has no
        model, or keeps gradients elsewhere (16-bit weights with 32-bit masters, several ranks)."""
        return await asyncio.to_thread(_write, getattr(self._holder, "model", None), Path(directory))


def _write(model: Any, directory: Path) -> list[str]:
    names: list[str] = []
    for name, parameter in model.named_parameters() if model is not None else ():
        if parameter.requires_grad and parameter.grad is not None:
            gradient = parameter.grad.to_dense() if parameter.grad.is_sparse else parameter.grad
            np.save(directory / f"{len(names)}.npy", gradient.detach().float().cpu().numpy())
            names.append(name)
    return names


@dataclass
class Gradient:
    """The gradient of a step's first minibatch, before it is clipped."""

    directory: Path
    names: list[str]

    @asynccontextmanager
    async def written(self, trainer: Trainer) -> AsyncIterator[None]:
        """The `writing` of a step, which begins when the first gradient is there and no parameter has moved."""
        self.names, _ = await trainer.endpoint.call("write", str(self.directory), deadline_s=STEP_DEADLINE_S)
        yield


@dataclass(frozen=True)
class GradientComparison:
    norm: float
    changed_norm: float
    cosine: float  # NaN if one of them is 0


def compare_gradients(first: Gradient, second: Gradient) -> GradientComparison | None:
    """Compare two gradients over all parameters, summed in float64. None if a gradient is not known."""
    if not first.names or not second.names:
        return None
    places = {name: number for number, name in enumerate(second.names)}
    sums = np.zeros(3)  # of the squares of both, and of their product
    for number, name in enumerate(first.names):
        one = np.load(first.directory / f"{number}.npy", mmap_mode="r").astype(np.float64).ravel()
        sums[0] += one @ one
        if (place := places.pop(name, None)) is not None:
            other = np.load(second.directory / f"{place}.npy", mmap_mode="r").astype(np.float64).ravel()
            sums[1:] += other @ other, one @ other
    for place in places.values():  # a parameter without a gradient in the first
        other = np.load(second.directory / f"{place}.npy", mmap_mode="r").astype(np.float64).ravel()
        sums[1] += other @ other
    scale = math.sqrt(sums[0] * sums[1])
    return GradientComparison(math.sqrt(sums[0]), math.sqrt(sums[1]), float(sums[2]) / scale if scale else math.nan)

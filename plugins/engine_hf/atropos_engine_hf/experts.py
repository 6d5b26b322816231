"""Record which experts the routers of a mixture choose, for a trainer that routes each token as the engine did."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from atropos_core.errors import FitError
from atropos_core.types import RoutedExperts
from atropos_torch_models.model_directory import NO_REPLAY
from atropos_torch_models.routers import routers_of

Numbers = NDArray[Any]  # uint8 or uint16, [T, L, k]: k experts of each of L layers


class RouterRecorder:
    """Hooks on the routers of a model. They record nothing outside `start` and `taken`, such as while sequences are scored."""

    def __init__(self, model: Any) -> None:
        """Raises FitError for a model without routers that return what they chose."""
        routers = routers_of(model)
        if not routers:
            raise FitError(
                f"engine 'hf' is to record which experts compute each token, as trainer.router_replay = true asks, and"
                f" {model.config.model_type!r} models have no routers that return the experts' numbers.",
                remedy=NO_REPLAY,
            )
        self._layers = len(routers)
        self._chosen: list[Tensor] | None = None  # [N, k] of each layer so far; None outside a pass
        for router in routers:
            router.register_forward_hook(self._note)

    def _note(self, router: Any, given: Any, made: tuple[Tensor, ...]) -> None:
        if self._chosen is not None:
            small = torch.uint8 if made[0].shape[-1] <= 256 else torch.int16
            self._chosen.append(made[2].to(small))

    def start(self) -> None:
        """Note what is chosen from now on."""
        self._chosen = []

    def taken(self, rows: int) -> Numbers:
        """Return what a forward pass over this many rows has chosen: [rows, columns, L, k], padding included."""
        return as_numbers(self.taken_on_device(rows).cpu().numpy())

    def taken_on_device(self, rows: int) -> Tensor:
        chosen, self._chosen = self._chosen or [], None
        assert len(chosen) == self._layers, "each router runs once in a forward pass"
        return torch.stack([one.reshape(rows, -1, one.shape[-1]) for one in chosen], dim=2)


def as_numbers(fetched: NDArray[Any]) -> Numbers:
    """Return what was fetched of `taken_on_device`: torch has no arithmetic for uint16, so int16 stands for it there."""
    return fetched.view(np.uint16) if fetched.dtype == np.int16 else fetched


class RowExperts:
    """Those of one row's positions, from the first on."""

    def __init__(self, most: int, numbers: Numbers) -> None:
        """Make room for this many positions of such numbers. Its memory is taken as they come."""
        self._numbers: Numbers = np.empty((most, *numbers.shape[1:]), numbers.dtype)
        self._count = 0

    def add(self, first: int, numbers: Numbers) -> None:
        """Note those of positions from `first` on. What is there already stays: it was computed when the next token was sampled."""
        end = first + len(numbers)
        if end > self._count:
            self._numbers[self._count : end] = numbers[self._count - first :]
            self._count = end

    def record(self, length: int) -> RoutedExperts:
        """Return those of the first `length` positions."""
        return RoutedExperts(np.arange(length) < self._count, self._numbers[: min(self._count, length)])

"""Show that both ends have the same memory: a sentinel that one end writes is read by the other."""

from __future__ import annotations

import torch

from atropos_bridge_ipc.manifest import PAGE
from atropos_core.interfaces import WeightHolder


class Sentinels:
    """The base of the extensions that hold the weights, the owner's and the trainer's."""

    def __init__(self, holder: WeightHolder) -> None:
        self.holder = holder
        self._flat: torch.Tensor  # the segment that both ends last agreed on
        self._device = torch.device("cpu")  # the device that holds the shared weights

    async def write_sentinel(self, slot: int, value: int) -> None:
        self._sentinels()[slot] = value
        await self.finish_writes()

    async def read_sentinel(self, slot: int) -> int:
        return int(self._sentinels()[slot])

    async def finish_writes(self) -> None:
        """Return once everything that was written can be read by the other end."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def _sentinels(self) -> torch.Tensor:
        return self._flat[:PAGE].view(torch.int64)

"""Updates of a model in the engine's own process: they are written into the tensors that it computes with."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from atropos_bridge_delta import update_file
from atropos_bridge_delta.tensors import bits, digest
from atropos_torch_models.tensors import check_same, describe, tensors_of


class LoadedModel:
    """The engine is a WeightHolder, and paused whenever something is written."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    def describe(self) -> list[list[Any]]:
        return [list(one) for one in describe(tensors_of(self._engine.model))]

    async def begin(self, tensors: Sequence[Sequence[Any]], wanted: str, directory: str, config: str) -> str:
        """If another run has left its weights, load those that the engine was started with, which are still on its own disk."""
        check_same(tensors, describe(tensors_of(self._engine.model)), "the engine")
        found = await asyncio.to_thread(self.digest)
        own = Path(getattr(self._engine.model, "name_or_path", "") or ".missing")
        if found != wanted and own.is_dir():
            await self._engine.load_weights(own)
            found = await asyncio.to_thread(self.digest)
        return found

    async def apply(self, file: BinaryIO) -> None:
        await asyncio.to_thread(self._apply, file)

    @torch.no_grad()
    def _apply(self, file: BinaryIO) -> None:
        update_file.apply(file, self._bits())

    def digest(self) -> str:
        return digest(self._bits())

    def close(self) -> None:
        """Do nothing: nothing was written to disk."""

    def _bits(self) -> list[Tensor]:
        return [bits(one) for one in tensors_of(self._engine.model).values()]

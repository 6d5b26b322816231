"""Several engines as one: which of them plays what."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from atropos_core.interfaces import Engine, ModelInfo
from atropos_core.types import Completion, Floats, Sampling, Tokens, TopK

MORE_ALLOWED = 8  # continuations that the engine of a prompt may have in flight beyond the least busy one


class Fleet(Engine):
    """Sends each prompt to one engine, by the prompt itself, so that the rollouts of a group share its prefix cache; to
    the least busy one where that engine is far behind. In a deterministic run by the prompt alone."""

    def __init__(self, engines: Sequence[Engine], *, deterministic: bool) -> None:
        self.engines = list(engines)
        self._deterministic = deterministic
        self._in_flight = [0] * len(self.engines)

    async def open(self) -> ModelInfo:
        return (await asyncio.gather(*(engine.open() for engine in self.engines)))[0]

    async def sample(
        self, prompt: Tokens, n: int, sampling: Sampling, seeds: Sequence[int], deadline_s: float
    ) -> list[Completion]:
        chosen = self._choose(prompt)
        self._in_flight[chosen] += n
        try:
            return await self.engines[chosen].sample(prompt, n, sampling, seeds, deadline_s)
        finally:
            self._in_flight[chosen] -= n

    async def logprobs(self, sequences: Sequence[Tokens], temperature: float = 1.0) -> list[Floats]:
        """By the first engine."""
        return await self.engines[0].logprobs(sequences, temperature)

    async def top_logprobs(self, sequences: Sequence[Tokens], k: int, temperature: float = 1.0) -> list[TopK]:
        """By the first engine."""
        return await self.engines[0].top_logprobs(sequences, k, temperature)

    async def pause(self) -> None:
        await asyncio.gather(*(engine.pause() for engine in self.engines))

    async def resume(self, version: int) -> None:
        await asyncio.gather(*(engine.resume(version) for engine in self.engines))

    async def load_weights(self, directory: Path) -> None:
        await asyncio.gather(*(engine.load_weights(directory) for engine in self.engines))

    async def load_adapter(self, directory: Path, version: int) -> None:
        await asyncio.gather(*(engine.load_adapter(directory, version) for engine in self.engines))

    async def close(self) -> None:
        await asyncio.gather(*(engine.close() for engine in self.engines))

    def _choose(self, prompt: Tokens) -> int:
        own = zlib.crc32(np.ascontiguousarray(prompt, dtype=np.int32).tobytes()) % len(self.engines)
        least = min(range(len(self.engines)), key=lambda i: self._in_flight[i])
        behind = self._in_flight[own] - self._in_flight[least] > MORE_ALLOWED
        return least if behind and not self._deterministic else own

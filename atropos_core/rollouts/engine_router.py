"""Several engines behind one interface: choose which of them samples a prompt."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np

from atropos_core.interfaces import Engine
from atropos_core.processes.forwarding import ForwardingEngine, Method
from atropos_core.types import Completion, Sampling, Tokens

T = TypeVar("T")
SCORING = frozenset({"logprobs", "top_logprobs"})
MORE_ALLOWED = 8  # continuations that the engine of a prompt may have in flight beyond the least busy one


class EngineRouter(ForwardingEngine):
    """Sends each prompt to one engine, chosen by the prompt, so that the rollouts of a group share its prefix cache. If that
    engine is far behind, the least busy one is chosen, except in a deterministic run."""

    def __init__(self, engines: Sequence[Engine], *, deterministic: bool) -> None:
        self.engines = list(engines)
        self._deterministic = deterministic
        self._in_flight = [0] * len(self.engines)

    async def forward(self, method: Method[T], *arguments: Any) -> T:
        """Call all engines and return the first one's answer; given sequences are scored only by the first."""
        engines = self.engines[:1] if method.__name__ in SCORING else self.engines
        answers: list[T] = await asyncio.gather(*(getattr(engine, method.__name__)(*arguments) for engine in engines))
        return answers[0]

    async def sample(
        self, prompt: Tokens, n: int, sampling: Sampling, seeds: Sequence[int], deadline_s: float
    ) -> list[Completion]:
        at = self._engine_of(prompt)
        self._in_flight[at] += n
        try:
            return await self.engines[at].sample(prompt, n, sampling, seeds, deadline_s)
        finally:
            self._in_flight[at] -= n

    def _engine_of(self, prompt: Tokens) -> int:
        own = zlib.crc32(np.ascontiguousarray(prompt, dtype=np.int32).tobytes()) % len(self.engines)
        least = min(range(len(self.engines)), key=lambda i: self._in_flight[i])
        behind = self._in_flight[own] - self._in_flight[least] > MORE_ALLOWED
        return least if behind and not self._deterministic else own

"""An engine in a child process that only scores given tokens, for teachers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from atropos_core.config.resolve import ResolvedComponent
from atropos_core.errors import DataError
from atropos_core.interfaces import Engine
from atropos_core.plugins.provider import RunContext
from atropos_core.processes.proxies import HostedEngine
from atropos_core.types import Tokens, TopK, offsets_of


class ScoringEngine:
    """`context.label` names its owner: "teacher.NAME"."""

    remedy = 'Set {label}.engine.use = "hf"'

    def __init__(self, component: ResolvedComponent, context: RunContext) -> None:
        self._component = component
        self._context = context
        self._engine: Engine | None = None

    async def open(self) -> None:
        """Start the engine. Raises what starting it or loading the model raises."""
        role, launcher = role_of(self._context.label), self._context.launcher
        child = await self._component.start(self._context, role, self._context.threads, needed=True, launcher=launcher)
        self._engine = HostedEngine(child)
        await self._engine.open()
        await self._engine.resume(0)

    async def load(self, directory: Path, version: int) -> None:
        """Load the weights of a model directory. Raises what loading them raises."""
        engine = self._opened()
        async with engine.paused(version):
            await engine.load_weights(directory)

    async def score(self, sequences: Sequence[Tokens], k: int, temperature: float) -> list[TopK]:
        """Return a TopK of T entries per sequence of T tokens: the k likeliest tokens of the distribution that predicts token t, or
        with k = 0 only token t. Entry 0 is empty: nothing predicts it. Raises NotImplementedError if the engine cannot do this, and
        DataError for logprobs that are not numbers."""
        if k:
            return await self._opened().top_logprobs(sequences, k, temperature)
        scored = await self._opened().logprobs(sequences, temperature)
        return [of_own_tokens(sequence, logprobs) for sequence, logprobs in zip(sequences, scored, strict=True)]

    async def release_cache(self) -> None:
        """Called when nothing is scored for a while: see `Engine.release_cache`."""
        await self._opened().release_cache()

    async def close(self) -> None:
        engine, self._engine = self._engine, None
        if engine is not None:
            await engine.close()

    def _opened(self) -> Engine:
        assert self._engine is not None, "open() comes first"
        return self._engine


def role_of(label: str) -> str:
    """Return the role's name, so that its log is "teacher-NAME.log"."""
    return label.replace(".", "-")


def of_own_tokens(sequence: Tokens, logprobs: NDArray[np.float32]) -> TopK:
    """Return one entry at each position but the first: the sequence's own token."""
    if not np.isfinite(logprobs).all():
        raise DataError("the teacher's logprobs are not all finite numbers: its weights are broken")
    counts = np.ones(len(sequence), np.int64)
    counts[:1] = 0
    return TopK(offsets_of(counts), np.asarray(sequence[1:], np.int32), np.asarray(logprobs[1:], np.float32))

"""Engines and the trainer of a run, with every call timed. What they are is behind these wrappers, unchanged."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from atropos_core.assemble import Parts, Plan
from atropos_core.fleet import Fleet
from atropos_core.interfaces import Engine, ModelInfo, Trainer, Writing
from atropos_core.profile import Profile
from atropos_core.types import Batch, Completion, Floats, Metrics, Sampling, Tokens


def timed_parts(parts: Parts, plan: Plan) -> Parts:
    """The same parts; calls to engines and trainer are counted in `parts.profile`, by their paths in the run file."""
    engines: list[Engine] = [
        TimedEngine(engine, chosen.label, parts.profile)
        for engine, chosen in zip(parts.engines, plan.engines, strict=True)
    ]
    one = engines[0] if len(engines) == 1 else Fleet(engines, deterministic=plan.config.deterministic)
    return replace(parts, engines=engines, engine=one, trainer=TimedTrainer(parts.trainer, parts.profile))


class TimedEngine(Engine):
    """`items` are continuations and sequences."""

    def __init__(self, engine: Engine, label: str, profile: Profile) -> None:
        self.endpoint = engine.endpoint
        self.outlives_run = engine.outlives_run
        self._engine = engine
        self._label = label
        self._profile = profile

    async def open(self) -> ModelInfo:
        with self._profile.call(f"{self._label}/open"):
            return await self._engine.open()

    async def sample(
        self, prompt: Tokens, n: int, sampling: Sampling, seeds: Sequence[int], deadline_s: float
    ) -> list[Completion]:
        with self._profile.call(f"{self._label}/sample", n):
            return await self._engine.sample(prompt, n, sampling, seeds, deadline_s)

    async def logprobs(self, sequences: Sequence[Tokens], temperature: float = 1.0) -> list[Floats]:
        with self._profile.call(f"{self._label}/logprobs", len(sequences)):
            return await self._engine.logprobs(sequences, temperature)

    async def pause(self) -> None:
        with self._profile.call(f"{self._label}/pause"):
            await self._engine.pause()

    async def resume(self, version: int) -> None:
        with self._profile.call(f"{self._label}/resume"):
            await self._engine.resume(version)

    async def load_weights(self, directory: Path) -> None:
        with self._profile.call(f"{self._label}/load_weights"):
            await self._engine.load_weights(directory)

    async def load_adapter(self, directory: Path, version: int) -> None:
        with self._profile.call(f"{self._label}/load_adapter"):
            await self._engine.load_adapter(directory, version)

    async def close(self) -> None:
        await self._engine.close()


class TimedTrainer(Trainer):
    """`items` are sequences."""

    def __init__(self, trainer: Trainer, profile: Profile) -> None:
        self.endpoint = trainer.endpoint
        self._trainer = trainer
        self._profile = profile

    async def open(self) -> ModelInfo:
        with self._profile.call("trainer/open"):
            return await self._trainer.open()

    async def step(self, batch: Batch, writing: Writing) -> Metrics:
        with self._profile.call("trainer/step", batch.sequences):
            return await self._trainer.step(batch, writing)

    async def logprobs(self, sequences: Sequence[Tokens], temperature: float = 1.0) -> list[Floats]:
        with self._profile.call("trainer/logprobs", len(sequences)):
            return await self._trainer.logprobs(sequences, temperature)

    async def save(self, directory: Path) -> None:
        with self._profile.call("trainer/save"):
            await self._trainer.save(directory)

    async def restore(self, directory: Path) -> None:
        with self._profile.call("trainer/restore"):
            await self._trainer.restore(directory)

    async def close(self) -> None:
        await self._trainer.close()

"""Base classes of wrappers of an engine or a trainer: each method of the interface goes through `forward`. Subclasses time, host
or route calls there."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from atropos_core.interfaces import Endpoint, Engine, ModelInfo, Trainer, Writing
from atropos_core.stepwise import (
    AdamSettings,
    AdapterEngine,
    AdapterSettings,
    StepwiseOutput,
    StepwiseTrainer,
    TargetSequence,
)
from atropos_core.types import Batch, Completion, Floats, Metrics, Sampling, Tokens, TopK

T = TypeVar("T")
Method = Callable[..., Awaitable[T]]  # of one of these interfaces
Interface = type[Engine] | type[Trainer] | type[AdapterEngine] | type[StepwiseTrainer]


def methods(interface: Interface) -> list[str]:
    """Return the names of the methods to forward."""
    return [name for name, value in vars(interface).items() if inspect.iscoroutinefunction(value)]


def extras(interface: type[Engine | Trainer]) -> type[AdapterEngine] | type[StepwiseTrainer]:
    """Return the interface that some engines, or some trainers, offer in addition."""
    return AdapterEngine if interface is Engine else StepwiseTrainer


class Forwarding(ABC):
    """An object that passes calls on to another one."""

    endpoint: Endpoint

    @abstractmethod
    async def forward(self, method: Method[T], *arguments: Any) -> T:
        """Return what `method` of the object behind this one returns for `arguments`."""


class ForwardingEngine(Forwarding, Engine):
    async def open(self) -> ModelInfo:
        return await self.forward(Engine.open)

    async def sample(
        self, prompt: Tokens, n: int, sampling: Sampling, seeds: Sequence[int], deadline_s: float
    ) -> list[Completion]:
        return await self.forward(Engine.sample, prompt, n, sampling, list(seeds), deadline_s)

    async def logprobs(self, sequences: Sequence[Tokens], temperature: float = 1.0) -> list[Floats]:
        return await self.forward(Engine.logprobs, list(sequences), temperature)

    async def top_logprobs(self, sequences: Sequence[Tokens], k: int, temperature: float = 1.0) -> list[TopK]:
        return await self.forward(Engine.top_logprobs, list(sequences), k, temperature)

    async def pause(self) -> None:
        await self.forward(Engine.pause)

    async def resume(self, version: int) -> None:
        await self.forward(Engine.resume, version)

    async def load_weights(self, directory: Path) -> None:
        await self.forward(Engine.load_weights, directory)

    async def load_adapter(self, directory: Path, version: int) -> None:
        await self.forward(Engine.load_adapter, directory, version)

    async def release_cache(self) -> None:
        await self.forward(Engine.release_cache)

    async def step_metrics(self) -> Metrics:
        return await self.forward(Engine.step_metrics)

    async def close(self) -> None:
        await self.forward(Engine.close)


class ForwardingTrainer(Forwarding, Trainer):
    async def open(self) -> ModelInfo:
        return await self.forward(Trainer.open)

    async def step(self, batch: Batch, writing: Writing) -> Metrics:
        return await self.forward(Trainer.step, batch, writing)

    async def supervised_step(self, batch: Batch, learning_rate: float) -> Metrics:
        return await self.forward(Trainer.supervised_step, batch, learning_rate)

    async def token_values(self) -> Mapping[str, Floats]:
        return await self.forward(Trainer.token_values)

    async def logprobs(self, sequences: Sequence[Tokens], temperature: float = 1.0) -> list[Floats]:
        return await self.forward(Trainer.logprobs, list(sequences), temperature)

    async def rounding(self, sequences: Sequence[Tokens], temperature: float = 1.0) -> float | None:
        return await self.forward(Trainer.rounding, list(sequences), temperature)

    async def save(self, directory: Path) -> None:
        await self.forward(Trainer.save, directory)

    async def restore(self, directory: Path) -> None:
        await self.forward(Trainer.restore, directory)

    async def close(self) -> None:
        await self.forward(Trainer.close)


class ForwardingAdapters(Forwarding):
    """The methods of `AdapterEngine`."""

    async def add_adapter(self, directory: Path, name: str) -> None:
        await self.forward(AdapterEngine.add_adapter, directory, name)

    async def remove_adapter(self, name: str) -> None:
        await self.forward(AdapterEngine.remove_adapter, name)

    async def sample_with(
        self, name: str | None, prompt: Tokens, n: int, sampling: Sampling, seeds: Sequence[int], deadline_s: float
    ) -> list[Completion]:
        return await self.forward(AdapterEngine.sample_with, name, prompt, n, sampling, list(seeds), deadline_s)

    async def logprobs_with(
        self, name: str | None, sequences: Sequence[Tokens], temperature: float = 1.0
    ) -> list[Floats]:
        return await self.forward(AdapterEngine.logprobs_with, name, list(sequences), temperature)

    async def top_logprobs_with(
        self, name: str | None, sequences: Sequence[Tokens], k: int, temperature: float = 1.0
    ) -> list[TopK]:
        return await self.forward(AdapterEngine.top_logprobs_with, name, list(sequences), k, temperature)


class ForwardingStepwise(Forwarding):
    """The methods of `StepwiseTrainer`."""

    async def create_adapter(self, name: str, settings: AdapterSettings) -> None:
        await self.forward(StepwiseTrainer.create_adapter, name, settings)

    async def drop_adapter(self, name: str) -> None:
        await self.forward(StepwiseTrainer.drop_adapter, name)

    async def forward_backward(
        self, name: str, sequences: Sequence[TargetSequence], loss: str, settings: Mapping[str, float], backward: bool
    ) -> StepwiseOutput:
        return await self.forward(
            StepwiseTrainer.forward_backward, name, list(sequences), loss, dict(settings), backward
        )

    async def optimizer_step(self, name: str, adam: AdamSettings) -> Metrics:
        return await self.forward(StepwiseTrainer.optimizer_step, name, adam)

    async def clear_gradient(self, name: str) -> None:
        await self.forward(StepwiseTrainer.clear_gradient, name)

    async def save_adapter(self, directory: Path, name: str, moments: bool) -> None:
        await self.forward(StepwiseTrainer.save_adapter, directory, name, moments)

    async def restore_adapter(self, directory: Path, name: str, moments: bool) -> None:
        await self.forward(StepwiseTrainer.restore_adapter, directory, name, moments)

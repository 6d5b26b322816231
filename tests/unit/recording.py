"""An engine and a trainer that write down each call that reaches them, and answer each with a value of its own. A plugin by itself:
tests install this file for a child process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from atropos_core import hookimpl
from atropos_core.codec import encode_bytes
from atropos_core.interfaces import Endpoint, Engine, ModelInfo, Trainer, Writing
from atropos_core.plugins.model_provider import EngineProvider, TrainerProvider
from atropos_core.plugins.options import Options
from atropos_core.stepwise import AdamSettings, AdapterSettings, StepwiseOutput, TargetSequence
from atropos_core.types import Batch, Completion, Floats, Metrics, Sampling, Tokens, TopK


class Recording(Options):
    notes: str  # a file: one line for each call


class Recorder:
    endpoint: Endpoint
    outlives_run = False

    def __init__(self, options: Recording, context: Any = None) -> None:
        self._notes = Path(options.notes)

    def note(self, method: str, *arguments: Any) -> None:
        with self._notes.open("a") as file:
            file.write(line(method, arguments) + "\n")

    async def open(self) -> ModelInfo:
        self.note("open")
        return ModelInfo("Recording", 7, 5, "float32", "cpu", "none")

    async def logprobs(self, sequences: Sequence[Tokens], temperature: float = 1.0) -> list[Floats]:
        self.note("logprobs", list(sequences), temperature)
        return [np.float32([0.0, -0.5])]

    async def close(self) -> None:
        self.note("close")


class RecordingEngine(Recorder, Engine):
    async def sample(
        self, prompt: Tokens, n: int, sampling: Sampling, seeds: Sequence[int], deadline_s: float
    ) -> list[Completion]:
        self.note("sample", prompt, n, sampling, list(seeds), deadline_s)
        return [Completion(np.int32([4]), np.float32([-1]), np.int32([3]), "stop", sampling.temperature)]

    async def top_logprobs(self, sequences: Sequence[Tokens], k: int, temperature: float = 1.0) -> list[TopK]:
        self.note("top_logprobs", list(sequences), k, temperature)
        return [TopK(np.int64([0, 2]), np.int32([1, 2]), np.float32([-0.1, -3.0]))]

    async def pause(self) -> None:
        self.note("pause")

    async def resume(self, version: int) -> None:
        self.note("resume", version)

    async def load_weights(self, directory: Path) -> None:
        self.note("load_weights", directory)

    async def load_adapter(self, directory: Path, version: int) -> None:
        self.note("load_adapter", directory, version)

    async def release_cache(self) -> None:
        self.note("release_cache")

    async def step_metrics(self) -> Metrics:
        self.note("step_metrics")
        return {"drafted_tokens": 3.0}

    async def add_adapter(self, directory: Path, name: str) -> None:
        self.note("add_adapter", directory, name)

    async def remove_adapter(self, name: str) -> None:
        self.note("remove_adapter", name)

    async def sample_with(
        self, name: str | None, prompt: Tokens, n: int, sampling: Sampling, seeds: Sequence[int], deadline_s: float
    ) -> list[Completion]:
        self.note("sample_with", name, prompt, n, sampling, list(seeds), deadline_s)
        return [Completion(np.int32([5]), np.float32([-2]), np.int32([0]), "stop", sampling.temperature)]

    async def logprobs_with(
        self, name: str | None, sequences: Sequence[Tokens], temperature: float = 1.0
    ) -> list[Floats]:
        self.note("logprobs_with", name, list(sequences), temperature)
        return [np.float32([0.0, -0.25])]

    async def top_logprobs_with(
        self, name: str | None, sequences: Sequence[Tokens], k: int, temperature: float = 1.0
    ) -> list[TopK]:
        self.note("top_logprobs_with", name, list(sequences), k, temperature)
        return [TopK(np.int64([0, 2]), np.int32([3, 4]), np.float32([-0.2, -2.0]))]


class RecordingTrainer(Recorder, Trainer):
    async def step(self, batch: Batch, writing: Writing) -> Metrics:
        async with writing():
            self.note("step", batch, True)
        return {"loss": 0.25}

    async def supervised_step(self, batch: Batch, learning_rate: float) -> Metrics:
        self.note("supervised_step", batch, learning_rate)
        return {"loss": 0.75}

    async def rounding(self, sequences: Sequence[Tokens], temperature: float = 1.0) -> float | None:
        self.note("rounding", list(sequences), temperature)
        return 0.125

    async def token_values(self) -> Mapping[str, Floats]:
        self.note("token_values")
        return {"entropy": np.full(2, 0.5, np.float32)}

    async def save(self, directory: Path) -> None:
        self.note("save", directory)

    async def restore(self, directory: Path) -> None:
        self.note("restore", directory)

    async def create_adapter(self, name: str, settings: AdapterSettings) -> None:
        self.note("create_adapter", name, settings)

    async def drop_adapter(self, name: str) -> None:
        self.note("drop_adapter", name)

    async def forward_backward(
        self, name: str, sequences: Sequence[TargetSequence], loss: str, settings: Mapping[str, float], backward: bool
    ) -> StepwiseOutput:
        self.note("forward_backward", name, list(sequences), loss, dict(settings), backward)
        return StepwiseOutput([np.float32([-0.5, -1.5])], {"loss:sum": 2.0})

    async def optimizer_step(self, name: str, adam: AdamSettings) -> Metrics:
        self.note("optimizer_step", name, adam)
        return {"grad_norm": 0.5}

    async def clear_gradient(self, name: str) -> None:
        self.note("clear_gradient", name)

    async def save_adapter(self, directory: Path, name: str, moments: bool) -> None:
        self.note("save_adapter", directory, name, moments)

    async def restore_adapter(self, directory: Path, name: str, moments: bool) -> None:
        self.note("restore_adapter", directory, name, moments)


def line(method: str, arguments: Sequence[Any]) -> str:
    return f"{method} {encode_bytes(list(arguments)).hex()}"


@hookimpl
def atropos_engines() -> list[EngineProvider]:
    return [EngineProvider("recording", "", Recording, RecordingEngine)]


@hookimpl
def atropos_trainers() -> list[TrainerProvider]:
    return [TrainerProvider("recording", "", Recording, RecordingTrainer)]

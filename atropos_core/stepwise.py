"""Optional methods of trainers and engines, for clients that train adapters call by call.

A client computes gradients, takes optimizer steps, saves and samples in its own order. Several clients, each with a named LoRA adapter,
share one base model. One adapter's work never changes another's: not its weights, its gradient, its moments or its samples.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from atropos_core.types import Completion, Floats, Metrics, Sampling, Tokens, TopK


@dataclass(frozen=True)
class AdapterSettings:
    """A LoRA adapter, and the layers that get one."""

    rank: int
    alpha: float  # the adapter's output is scaled by alpha / rank
    seed: int  # of its first weights; they depend on nothing else
    attention: bool = True  # in each layer of the model, everything but its MLP: also recurrent layers and convolutions
    mlp: bool = True  # including experts
    head: bool = True  # the language-model head


@dataclass(frozen=True)
class TargetSequence:
    """One sequence, and the tokens to score at each of its positions. Targets need not be the sequence's own next tokens."""

    tokens: Tokens  # [N] the model's input
    targets: NDArray[np.int64]  # [N] or [N, K]: entry i is predicted from tokens[: i + 1]
    values: Mapping[str, Floats] = field(default_factory=dict)  # what the loss needs, each in the shape of `targets`


@dataclass(frozen=True)
class AdamSettings:
    """The values of one step of AdamW."""

    learning_rate: float
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    max_grad_norm: float = 0.0  # the gradient is scaled down to this global norm; 0: it is not


@dataclass(frozen=True)
class StepwiseOutput:
    """The result of one forward pass, or of one with its backward pass."""

    logprobs: Sequence[Floats]  # of each sequence, in the shape of its targets
    metrics: Metrics  # "loss:sum": the loss is always a sum over tokens


@runtime_checkable
class StepwiseTrainer(Protocol):
    """A trainer that also trains named adapters call by call. Calls on one adapter take effect in the order in which they were made.
    An adapter's state follows from its own calls only. With a deterministic trainer, so do its bits.

    A call that is refused changes nothing. DataError: an unknown adapter or loss, or input that does not fit. TrainingDiverged: a loss or
    a gradient is not a finite number."""

    async def create_adapter(self, name: str, settings: AdapterSettings) -> None:
        """Add an adapter that does not change the model yet. Raises DataError if the name is taken."""

    async def drop_adapter(self, name: str) -> None:
        """Remove an adapter and everything that belongs to it."""

    async def forward_backward(
        self, name: str, sequences: Sequence[TargetSequence], loss: str, settings: Mapping[str, float], backward: bool
    ) -> StepwiseOutput:
        """Compute logprobs and the loss of these sequences, and unless `backward` is false, add its gradient to that of earlier calls.
        `loss` is one of `cross_entropy`, `importance_sampling`, `ppo`, `cispo`, `dro`, `gspo`; `settings` are its numbers."""
        ...

    async def optimizer_step(self, name: str, adam: AdamSettings) -> Metrics:
        """Update the adapter by the gradient that was added up, and clear it. A gradient that nothing was added to is zero."""
        ...

    async def clear_gradient(self, name: str) -> None:
        """Forget what was added up since the last step."""

    async def save_adapter(self, directory: Path, name: str, moments: bool) -> None:
        """Write the adapter into this existing, empty directory as peft does, and with `moments` the optimizer's state next to it. A
        gradient that was added up is not saved."""

    async def restore_adapter(self, directory: Path, name: str, moments: bool) -> None:
        """Make `name` the adapter that was saved there, with its own settings. If there was one of this name, it is replaced, with its
        gradient. Without `moments` the optimizer begins anew. Raises CheckpointError."""


@runtime_checkable
class AdapterEngine(Protocol):
    """An engine that also samples from named adapters of its base model. Each is a snapshot: it stays as it was added."""

    async def add_adapter(self, directory: Path, name: str) -> None:
        """Read a peft adapter and keep it until it is removed. Returns once `directory` is no longer read. Raises DataError if the name
        is taken, or if the directory has no adapter of this model."""

    async def remove_adapter(self, name: str) -> None:
        """Remove an adapter once the requests in flight that use it have ended."""

    async def sample_with(
        self, name: str | None, prompt: Tokens, n: int, sampling: Sampling, seeds: Sequence[int], deadline_s: float
    ) -> list[Completion]:
        """Do what `Engine.sample` does, with this adapter. None: with the base model. Requests for other adapters do not change the
        result."""
        ...

    async def logprobs_with(
        self, name: str | None, sequences: Sequence[Tokens], temperature: float = 1.0
    ) -> list[Floats]:
        """Do what `Engine.logprobs` does, with this adapter."""
        ...

    async def top_logprobs_with(
        self, name: str | None, sequences: Sequence[Tokens], k: int, temperature: float = 1.0
    ) -> list[TopK]:
        """Do what `Engine.top_logprobs` does, with this adapter."""
        ...

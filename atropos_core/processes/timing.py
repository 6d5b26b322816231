"""Wrappers that time every call of a run's engines and trainer, and change nothing else."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from atropos_core.interfaces import Engine, Trainer
from atropos_core.observe.profile import Profile
from atropos_core.processes.forwarding import Forwarding, ForwardingEngine, ForwardingTrainer, Method

T = TypeVar("T")
ITEMS: Mapping[str, Callable[..., int]] = {  # what a call is about: continuations, sequences
    "sample": lambda prompt, n, *rest: n,
    "logprobs": lambda sequences, *rest: len(sequences),
    "top_logprobs": lambda sequences, *rest: len(sequences),
    "step": lambda batch, writing: batch.sequences,
    "supervised_step": lambda batch, learning_rate: batch.sequences,
}


class Timed(Forwarding):
    """A wrapper that counts a component's calls as LABEL/METHOD."""

    def __init__(self, behind: Engine | Trainer, label: str, profile: Profile) -> None:
        self.endpoint = behind.endpoint
        self.behind = behind
        self._label = label
        self._profile = profile

    async def forward(self, method: Method[T], *arguments: Any) -> T:
        name = method.__name__
        items = ITEMS[name](*arguments) if name in ITEMS else 0
        with self._profile.call(f"{self._label}/{name}", items):
            answer: T = await getattr(self.behind, name)(*arguments)
        return answer

    async def close(self) -> None:
        await self.behind.close()


class TimedEngine(Timed, ForwardingEngine):
    def __init__(self, engine: Engine, label: str, profile: Profile) -> None:
        super().__init__(engine, label, profile)
        self.outlives_run = engine.outlives_run


class TimedTrainer(Timed, ForwardingTrainer):
    def __init__(self, trainer: Trainer, profile: Profile) -> None:
        super().__init__(trainer, "trainer", profile)

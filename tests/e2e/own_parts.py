"""One component of each kind that a run file can name, in a file of its own and in no plugin."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np

from atropos_core import Environment, Options, Score, Task
from atropos_core.builtin.config import ToyEngineOptions, ToyTrainerOptions
from atropos_core.builtin.curricula import OrderedCurriculum
from atropos_core.builtin.toy import ToyEngine, ToyTrainer
from atropos_core.interfaces import Bridge, Publication, Sink, Teacher
from atropos_core.plugins.provider import RunContext


class Sevens(Environment):
    """The more sevens, the better."""

    def tasks(self, split):
        return [Task(f"{split}-{n}", ({"role": "user", "content": f"say 7 to {n}"},), answer="7") for n in range(8)]

    async def score(self, task, reply):
        return Score(reply["content"].count("7") / 8)


async def short(task, episodes):
    return np.array([-float(len(episode.messages[-1]["content"])) for episode in episodes], np.float32)


class Bonus:
    class Options(Options):
        size: float = 0.5

    def __init__(self, options: Bonus.Options) -> None:
        self._size = options.size

    async def __call__(self, task, episodes):
        return np.full(len(episodes), self._size, np.float32)


async def centre(groups):
    return [group.with_advantages(group.rewards - group.rewards.mean()) for group in groups]


class Backwards(OrderedCurriculum):
    def __init__(self, context: RunContext) -> None:
        super().__init__(context.seed, shuffled=False)


class Silent(Teacher):
    async def annotate(self, groups):
        return groups


class Lines(Sink):
    class Options(Options):
        name: str = "lines.txt"

    def __init__(self, options: Lines.Options, context: RunContext) -> None:
        self._path = context.directory / options.name

    async def step(self, step, metrics, groups):
        with self._path.open("a") as file:
            file.write(f"{step} {sorted(name for name in metrics if name.startswith('reward/'))}\n")


class FileEngine(ToyEngine):
    """The toy in a process of its own, which takes weights from a file."""

    Options = ToyEngineOptions
    transports = frozenset({"checkpoint"})
    runs_in = "process"

    async def load_weights(self, directory: Path) -> None:
        self.weights["table"][:] = np.load(directory / "table.npy")


class FileTrainer(ToyTrainer):
    Options = ToyTrainerOptions
    transports = frozenset({"checkpoint"})
    runs_in = "process"


class Saver:
    """The bridge's end in the trainer's process."""

    def __init__(self, trainer: ToyTrainer) -> None:
        self._trainer = trainer

    async def save(self, directory: str) -> None:
        await self._trainer.save(Path(directory))


class FileBridge(Bridge):
    transports = frozenset({"checkpoint"})

    def __init__(self, context: RunContext) -> None:
        self._directory = context.directory / "weights"

    def extensions(self) -> Any:
        return {"trainer": f"{__file__}:Saver"}

    async def connect(self, trainer, engines):
        self._directory.mkdir(exist_ok=True)
        self._trainer, self._engines = trainer, engines

    @asynccontextmanager
    async def writing(self, version: int) -> AsyncIterator[None]:
        for engine in self._engines:
            await engine.pause()
        yield
        await self._trainer.call("save", str(self._directory))
        for engine in self._engines:
            await engine.load_weights(self._directory)
            await engine.resume(version)
        self.published = Publication(version, 0.0, 0)

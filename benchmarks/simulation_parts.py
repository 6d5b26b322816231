"""An engine, a trainer and an environment whose time is waiting and not the processor's, so that a machine with few cores can have
several: as fast as their options say. For benchmarks/simulation.py."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence

import numpy as np
from pydantic import Field

from atropos_core.builtin.config import ToyEngineOptions, ToyTrainerOptions
from atropos_core.builtin.toy import ToyEngine, ToyTrainer
from atropos_core.conversation import Policy
from atropos_core.interfaces import Environment, Episode, Split, Writing
from atropos_core.plugins.options import Options
from atropos_core.plugins.provider import RunContext
from atropos_core.types import Batch, Completion, Message, Metrics, Sampling, Task, Tokens


class EngineOptions(ToyEngineOptions):
    decode_s: float = Field(0.02, ge=0, description="seconds of a decode step")
    sequence_s: float = Field(0.0025, ge=0, description="and for each sequence in it")
    mean_tokens: float = Field(24, gt=1, description="of a reply, before it is cut off")


class WaitingEngine(ToyEngine):
    """Batches continuously: in each decode step every sequence that is there gets a token. All tokens are equally likely, as the
    toy policy has them before it learns."""

    Options = EngineOptions
    transports = frozenset({"in_process"})

    def __init__(self, options: EngineOptions, context: RunContext) -> None:
        super().__init__(options, context)
        self._timed = options
        self._batch: dict[asyncio.Future[None], int] = {}  # -> tokens to come
        self._decoding: asyncio.Task[None] | None = None

    async def sample(
        self, prompt: Tokens, n: int, sampling: Sampling, seeds: Sequence[int], deadline_s: float
    ) -> list[Completion]:
        return list(await asyncio.gather(*(self._reply(sampling, seed) for seed in seeds)))

    async def _reply(self, sampling: Sampling, seed: int) -> Completion:
        vocabulary = len(self.weights["table"])
        random = np.random.Generator(np.random.Philox(key=seed))
        wanted = int(random.geometric(1 / self._timed.mean_tokens))
        length = min(wanted, sampling.max_tokens)
        ids = random.integers(0, vocabulary - 1, length).astype(np.int32)
        ids += ids >= self._end
        if wanted <= sampling.max_tokens:
            ids[-1] = self._end
        version = self._version
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._batch[done] = length
        if self._decoding is None or self._decoding.done():
            self._decoding = asyncio.create_task(self._decode())
        await done
        logprobs = np.full(length, -math.log(vocabulary), np.float32)
        finish = "stop" if wanted <= sampling.max_tokens else "length"
        return Completion(
            ids, logprobs, np.full(length, version, np.int32), finish, sampling.temperature, sampling.truncated
        )

    async def _decode(self) -> None:
        loop = asyncio.get_running_loop()
        due = loop.time()
        while self._batch:
            if not self._may_run.is_set():
                await self._may_run.wait()
                due = loop.time()
            due += self._timed.decode_s + self._timed.sequence_s * len(self._batch)
            await asyncio.sleep(max(due - loop.time(), 0))  # to the moment: a late waking is not carried on
            for done in list(self._batch):
                self._batch[done] -= 1
                if not self._batch[done]:
                    del self._batch[done]
                    done.set_result(None)


class TrainerOptions(ToyTrainerOptions):
    step_s: float = Field(0.25, ge=0, description="seconds of an update")
    token_s: float = Field(0.0005, ge=0, description="and for each trained token")


class WaitingTrainer(ToyTrainer):
    """Of a learning rate so small that all tokens stay equally likely."""

    Options = TrainerOptions
    transports = frozenset({"in_process"})

    def __init__(self, options: TrainerOptions, context: RunContext) -> None:
        super().__init__(options.model_copy(update={"learning_rate": 1e-9}), context)
        self._timed = options

    async def step(self, batch: Batch, writing: Writing) -> Metrics:
        await asyncio.sleep(self._timed.step_s + self._timed.token_s * int(batch.trained.sum()))
        return await super().step(batch, writing)


class EnvironmentOptions(Options):
    latency_s: float = Field(0.2, ge=0, description="after a reply, as of a grader far away")


class WaitingTasks(Environment):
    """Scored by the length of the reply."""

    Options = EnvironmentOptions

    def __init__(self, options: EnvironmentOptions) -> None:
        self._latency_s = options.latency_s

    def tasks(self, split: Split) -> Sequence[Task]:
        return [Task(f"{split}-{i}", ({"role": "user", "content": f"task {i} of {split}"},)) for i in range(1000)]

    async def rollout(self, task: Task, policy: Policy, *, seed: int) -> Episode:
        episode = await super().rollout(task, policy, seed=seed)
        await asyncio.sleep(self._latency_s)
        return episode

    async def score(self, task: Task, reply: Message) -> float:
        return float(len(str(reply["content"])) % 7)

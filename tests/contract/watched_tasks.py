"""An environment that can be made to fail, to be slow, and to count how often it scores."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from atropos_core.conversation import Policy
from atropos_core.interfaces import Environment
from atropos_core.plugins.options import Options
from atropos_core.types import Episode, Message, Score, Split, Task

SCORED: list[str] = []  # the tasks whose replies were scored


class WatchedOptions(Options):
    fails: bool = False  # every rollout of an odd seed
    slow_s: float = 0.0
    off_nats: float = 0.0  # that the logprobs of a rollout are off
    flat: bool = False  # the first four tasks have one score for all replies


class Watched(Environment):
    Options = WatchedOptions

    def __init__(self, options: WatchedOptions) -> None:
        self._options = options

    def tasks(self, split: Split) -> Sequence[Task]:
        numbers = range(16) if split == "train" else range(16, 24)
        return [Task(f"{split}-{n}", ({"role": "user", "content": f"say {n}"},), data={"n": n}) for n in numbers]

    async def score(self, task: Task, reply: Message) -> Score:
        SCORED.append(task.id)
        text = str(reply["content"])
        if self._options.flat and task.data["n"] < 4:
            return Score(1.0, correct=True)
        return Score(float(sum(map(ord, text)) % 97), correct="e" in text)


class Unsteady(Watched):
    """Rollouts fail and take their time, as its options say."""

    async def rollout(self, task: Task, policy: Policy, *, seed: int) -> Episode:
        await asyncio.sleep(self._options.slow_s)
        if self._options.fails and seed % 2:
            raise ValueError("an odd seed")
        episode = await super().rollout(task, policy, seed=seed)
        [rollout] = episode.rollouts
        assert rollout.logprobs is not None
        off = np.where(rollout.sampled, rollout.logprobs - np.float32(self._options.off_nats), np.float32(0))
        return replace(episode, rollouts=(replace(rollout, logprobs=off),))


class Constant(Watched):
    """Another one, whose score is the length of a reply."""

    async def score(self, task: Task, reply: Message) -> Score:
        return Score(float(len(str(reply["content"]))), correct=True)

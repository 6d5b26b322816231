"""The environment `gsm8k` with a grader far away: a rollout waits before it ends, and computes nothing meanwhile."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace

from pydantic import Field

from atropos_core.conversation import Policy
from atropos_core.interfaces import Episode
from atropos_core.types import Task
from atropos_env_gsm8k.config import Gsm8kOptions
from atropos_env_gsm8k.environment import Gsm8k


class SlowOptions(Gsm8kOptions):
    latency_s: float = Field(
        0.5, ge=0
    )  # on average; a rollout waits between half of it and one and a half times as long


class SlowGsm8k(Gsm8k):
    """Training rollouts wait, held-out ones do not."""

    Options = SlowOptions

    def __init__(self, options: SlowOptions) -> None:
        super().__init__(options)
        self._latency_s = options.latency_s

    async def rollout(self, task: Task, policy: Policy, *, seed: int) -> Episode:
        began = asyncio.get_running_loop().time()
        episode = await super().rollout(task, policy, seed=seed)
        sampled = asyncio.get_running_loop().time()
        if policy.sampling.temperature:
            await asyncio.sleep(self._latency_s * random.Random(seed).uniform(0.5, 1.5))
        return replace(episode, metrics={**episode.metrics, "sampling_s": sampled - began})

"""The environment `gsm8k` whose rollouts each wait for as long as a file says at that moment, and are written down by who runs
them. Where it says "broken", no worker can open it."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path

from atropos_core.conversation import Policy
from atropos_core.interfaces import Episode
from atropos_core.types import Task
from atropos_env_gsm8k.config import Gsm8kOptions
from atropos_env_gsm8k.environment import Gsm8k


class WaitingOptions(Gsm8kOptions):
    wait: Path  # a file: seconds
    ledger: Path  # a line for each training rollout that has ended


class Waiting(Gsm8k):
    Options = WaitingOptions

    def __init__(self, options: WaitingOptions) -> None:
        super().__init__(options)
        self._wait, self._ledger = options.wait, options.ledger

    async def open(self) -> None:
        await super().open()
        if self._wait.read_text() == "broken" and sys.argv[1:2] == ["env"]:
            raise RuntimeError("no worker of mine runs")

    async def rollout(self, task: Task, policy: Policy, *, seed: int) -> Episode:
        episode = await super().rollout(task, policy, seed=seed)
        if policy.sampling.temperature:
            await asyncio.sleep(float(self._wait.read_text()))
            with self._ledger.open("a") as ledger:
                ledger.write(json.dumps([os.getpid(), task.id, seed]) + "\n")
        return episode

"""The environment `gsm8k` under a judge that marks from 0 to 100 and knows nothing: what a bad reward in a large unit does to a
mixed run. Right and wrong are still counted, so accuracy means what it does elsewhere."""

from __future__ import annotations

import random
from dataclasses import replace

from atropos_core.types import Message, Score, Task
from atropos_env_gsm8k.config import Gsm8kOptions
from atropos_env_gsm8k.environment import Gsm8k


class JudgedGsm8k(Gsm8k):
    """A reply's mark depends on nothing but its text, by a generator."""

    Options = Gsm8kOptions

    async def score(self, task: Task, reply: Message) -> Score:
        scored = await super().score(task, reply)
        return replace(scored, value=random.Random(f"{task.id} {reply.get('content')}").uniform(0, 100))

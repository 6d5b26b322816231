"""An environment whose rewards differ, whatever a model with random weights says."""

from __future__ import annotations

from hashlib import sha256

from atropos_core.interfaces import Environment
from atropos_core.types import Message, Score, Task

PROMPTS = ("How many?", "Anna has 4 apples and buys 7 more. How many apples does she have now?")


class Digests(Environment):
    def tasks(self, split: str) -> list[Task]:
        return [Task(f"{split}-{n}", ({"role": "user", "content": f"{n}: {PROMPTS[n % 2]}"},)) for n in range(8)]

    async def score(self, task: Task, reply: Message) -> Score:
        return Score(sha256(str(reply["content"]).encode()).digest()[0] / 255)

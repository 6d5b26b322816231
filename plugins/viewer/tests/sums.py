"""Small tasks for the toy policy; what it says is scored by its letters, so that rewards differ."""

from __future__ import annotations

from collections.abc import Sequence

from atropos_core.interfaces import Environment
from atropos_core.types import Message, Score, Split, Task


class Sums(Environment):
    def tasks(self, split: Split) -> Sequence[Task]:
        numbers = range(16) if split == "train" else range(16, 32)
        return [Task(f"{split}-{n}", ({"role": "user", "content": f"say {n}"},)) for n in numbers]

    async def score(self, task: Task, reply: Message) -> Score:
        text = str(reply["content"])
        return Score(float(sum(map(ord, text)) % 97) / 97, correct="e" in text)

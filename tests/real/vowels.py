"""An environment in which nearly every reply of a pretrained model has another score."""

from atropos_core.interfaces import Environment
from atropos_core.types import Score, Task


class Vowels(Environment):
    """The more vowels, the better."""

    def tasks(self, split):
        numbers = range(8) if split == "train" else range(8, 10)
        return [Task(f"{split}-{n}", ({"role": "user", "content": f"Say {n}."},)) for n in numbers]

    async def score(self, task, reply):
        text = reply["content"]
        return Score(sum(letter in "aeiou" for letter in text) / max(len(text), 1))

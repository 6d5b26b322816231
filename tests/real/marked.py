"""Word problems whose replies are longer than the tests allow, scored by their answer or by their words."""

from atropos_core.interfaces import Environment
from atropos_core.types import Score, Task


class Marked(Environment):
    """Scores 1 for the right number after ####."""

    def tasks(self, split):
        question = (
            "Tom has {} apples and buys {} more. How many has he? Explain step by step, then write #### and the number."
        )
        numbers = range(8) if split == "train" else range(8, 24)
        return [
            Task(f"{split}-{n}", ({"role": "user", "content": question.format(n, n + 3)},), answer=f"#### {2 * n + 3}")
            for n in numbers
        ]

    async def score(self, task, reply):
        return Score(float(reply["content"].strip().endswith(task.answer)))


class Words(Marked):
    """Scores how many different words of three letters or more a reply has beyond three."""

    async def score(self, task, reply):
        words = {word for word in reply["content"].lower().split() if len(word) > 2}
        return Score(max(len(words) - 3, 0) / 10)

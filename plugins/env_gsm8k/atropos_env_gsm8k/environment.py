"""The environment `gsm8k`: one question, one reply, right or wrong."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from atropos_core.builtin.numbers import last_value, stated_answer
from atropos_core.interfaces import Environment
from atropos_core.types import Message, Score, Split, Task
from atropos_env_gsm8k.config import Gsm8kOptions
from atropos_env_gsm8k.data import load
from atropos_env_gsm8k.grading import Grader, lenient_answer


class Gsm8k(Environment):
    """Scores 1 for the right number and 0 for any other reply."""

    answer_format = (
        'It is read after "####" or in \\boxed{}; environment.{name}.instruction may show an example, and with '
        'environment.{name}.grading = "lenient" the last number of a reply counts.'
    )

    def __init__(self, options: Gsm8kOptions) -> None:
        self._options = options
        self._tasks: dict[Split, Sequence[Task]] = {}
        self._grader = Grader(options.grading_deadline_s)

    def source(self) -> str:
        where = {"generated": "generated locally, nothing downloaded", "path": f"files in {self._options.path}"}
        return where.get(self._options.source, f"{self._options.dataset} from the hub")

    async def open(self) -> None:
        splits: tuple[Split, ...] = ("train", "test")
        for split in splits:
            self._tasks[split] = await asyncio.to_thread(load, self._options, split)

    async def close(self) -> None:
        await self._grader.close()

    def tasks(self, split: Split) -> Sequence[Task]:
        if split not in self._tasks:
            self._tasks[split] = load(self._options, split)
        return self._tasks[split]

    async def score(self, task: Task, reply: Message) -> Score:
        text = str(reply.get("content") or "")
        gold = task.data["number"]
        stated = stated_answer(text)
        strict = await self._grader.equals(stated, gold)
        lenient = strict or await self._grader.equals(lenient_answer(text), gold)
        correct = strict if self._options.grading == "strict" else lenient
        answered = correct or (
            stated is not None if self._options.grading == "strict" else last_value(text) is not None
        )
        return Score(
            float(correct),
            correct=correct,
            metrics={"accuracy_strict": float(strict), "accuracy_lenient": float(lenient), "answered": float(answered)},
        )

"""The environment `dataset`: a row's prompt, one reply, and a comparison with the row's answer."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from atropos_core.interfaces import Environment
from atropos_core.types import Message, Score, Split, Task
from atropos_env_dataset.config import DatasetOptions
from atropos_env_dataset.rows import load, tools_of
from atropos_env_dataset.scores import readable, scorer


class Dataset(Environment):
    """Scores 1 for a right reply and 0 for any other, or what a function of the user says."""

    def __init__(self, options: DatasetOptions, label: str, model: Path | None = None) -> None:
        """`model`: the directory of the policy, whose tokenizer counts the tokens of prompts."""
        self._options = options
        self._label = label  # prefix of its options, for errors that name one
        self._model = model
        self._tasks: dict[Split, Sequence[Task]] | None = None
        self._scorer = scorer(options)
        if options.pattern is not None:
            self.answer_format = (
                f"It is what environment.{{name}}.pattern finds, {options.pattern!r}; environment.{{name}}.instruction may show "
                "an example."
            )

    def source(self) -> str:
        return str(self._options.tasks or f"{self._options.hub} from the hub")

    async def open(self) -> None:
        places: dict[int, str] = {}
        loaded = await asyncio.to_thread(load, self._options, self._label, self._model, places)
        options = self._options
        files: dict[Split, Path | None] = {"train": options.tasks, "test": options.test_tasks or options.tasks}
        self._tasks = {
            split: await readable(
                loaded[split], self._scorer, str(file or options.hub), places, leave_out=options.leave_out_unreadable
            )
            for split, file in files.items()
        }

    async def close(self) -> None:
        await self._scorer.close()

    def tasks(self, split: Split) -> Sequence[Task]:
        if self._tasks is None:
            self._tasks = load(self._options, self._label, self._model)
        return self._tasks[split]

    def tools_of(self, task: Task) -> Sequence[Mapping[str, Any]]:
        return tools_of(task)

    async def score(self, task: Task, reply: Message) -> Score:
        return await self._scorer.score(task, reply)

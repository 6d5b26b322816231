"""The environment `gsm8k` among tasks that teach nothing: some on which any reply is right, and some on which none is. Held-out
problems are gsm8k's own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from pydantic import Field

from atropos_core.types import Message, Score, Split, Task
from atropos_env_gsm8k.config import Gsm8kOptions
from atropos_env_gsm8k.environment import Gsm8k

SOLVED, OWN, HOPELESS = range(3)


class MixedOptions(Gsm8kOptions):
    problems: int = Field(20_000, ge=1)  # of all kinds
    cycle: tuple[int, ...] = (
        OWN,
        HOPELESS,
        HOPELESS,
        SOLVED,
        HOPELESS,
    )  # the kinds of one task after another, over and over


class MixedGsm8k(Gsm8k):
    """`data["kind"]` says which kind a task is, as the name of a data source would."""

    Options = MixedOptions

    def __init__(self, options: MixedOptions) -> None:
        super().__init__(options)
        self._cycle = options.cycle

    def tasks(self, split: Split) -> Sequence[Task]:
        return super().tasks(split) if split == "test" else _Mixed(super().tasks(split), self._cycle)

    async def score(self, task: Task, reply: Message) -> Score:
        kind = task.data.get("kind", OWN)
        if kind != OWN:
            return Score(float(kind == SOLVED), correct=kind == SOLVED)
        return await super().score(task, reply)


class _Mixed(Sequence[Task]):
    def __init__(self, tasks: Sequence[Task], cycle: Sequence[int]) -> None:
        self._tasks, self._cycle = tasks, cycle

    def __len__(self) -> int:
        return len(self._tasks)

    def __getitem__(self, index):  # type: ignore[no-untyped-def]  # an index alone is used
        task = self._tasks[index]
        return replace(task, data={**task.data, "kind": self._cycle[index % len(self._cycle)]})

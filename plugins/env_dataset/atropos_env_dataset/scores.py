"""How a reply is compared with a row's answer."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Iterable
from importlib.util import find_spec
from inspect import isawaitable

from atropos_core.builtin.rewards import last_number
from atropos_core.errors import ConfigError, DataError, DeadlineExceeded
from atropos_core.interfaces import Score
from atropos_core.plugins.references import load_reference
from atropos_core.processes.function_worker import Worker
from atropos_core.types import Message, Task
from atropos_env_dataset.config import DatasetOptions

TOLERANCE = 1e-6  # of numbers, relative to the answer, or absolute where that is below 1
LONGEST = 10_000  # characters of the end of a reply that math-verify reads
MATH = "atropos_env_dataset.math_answers:equal"


class Scorer:
    def check(self, tasks: Iterable[Task]) -> None:
        """Raises DataError for the first whose answer cannot be compared with anything."""

    async def score(self, task: Task, reply: Message) -> Score:
        raise NotImplementedError

    async def close(self) -> None:
        """May be called twice."""


class Compared(Scorer):
    """By `same`(what the reply says, the answer), of the whole reply or of what the pattern finds in it."""

    def __init__(self, same: Callable[[str, str], bool], pattern: str | None) -> None:
        self._same = same
        self._pattern = re.compile(pattern, re.DOTALL) if pattern else None

    async def score(self, task: Task, reply: Message) -> Score:
        said = self._said(str(reply.get("content") or ""))
        correct = said is not None and self._same(said, task.answer or "")
        metrics = {} if self._pattern is None else {"answered": float(said is not None)}
        return Score(float(correct), correct=correct, metrics=metrics)

    def _said(self, text: str) -> str | None:
        if self._pattern is None:
            return text
        *_, last = [None, *self._pattern.finditer(text)]
        return None if last is None else last[1 if self._pattern.groups else 0] or ""


class Numeric(Compared):
    def __init__(self, pattern: str | None) -> None:
        super().__init__(same_number, pattern)

    def check(self, tasks: Iterable[Task]) -> None:
        for task in tasks:
            if last_number(task.answer or "") is None:
                raise DataError(
                    f"dataset: the answer of task {task.id} has no number in it: {task.answer!r:.80}.",
                    remedy='score = "exact" compares texts, score = "math" expressions.',
                )


class Math(Scorer):
    """By math-verify, in a process of its own, since sympy may take for ever. What is not compared in time is wrong."""

    def __init__(self, deadline_s: float) -> None:
        if find_spec("math_verify") is None:
            raise ConfigError(
                'dataset: score = "math" needs math-verify, which is not installed.',
                remedy='pip install "atropos-plugin-env-dataset[math]"',
            )
        self._worker = Worker(MATH)
        self._deadline_s = deadline_s

    async def score(self, task: Task, reply: Message) -> Score:
        text = str(reply.get("content") or "")[-LONGEST:]
        try:
            correct = await self._worker.call(text, task.answer, deadline_s=self._deadline_s)
        except DeadlineExceeded:
            return Score(0.0, correct=False, metrics={"math_timeouts": 1.0})
        if correct is None:
            raise DataError(f"dataset: math-verify cannot read the answer of task {task.id}: {task.answer!r:.80}")
        return Score(float(correct), correct=bool(correct), metrics={"math_timeouts": 0.0})

    async def close(self) -> None:
        await self._worker.close()


class Yours(Scorer):
    """A function (task, reply) -> float or Score, which may be a coroutine function."""

    def __init__(self, reference: str) -> None:
        self._function: Callable[[Task, Message], float | Score | Awaitable[float | Score]] = load_reference(reference)
        if not callable(self._function):
            raise ConfigError(f"dataset: score = {reference!r} is {self._function!r:.80}, and not a function.")

    async def score(self, task: Task, reply: Message) -> Score:
        made = self._function(task, reply)
        given = await made if isawaitable(made) else made
        return given if isinstance(given, Score) else Score(given)


def scorer(options: DatasetOptions) -> Scorer:
    if options.score == "numeric":
        return Numeric(options.pattern)
    if options.score == "exact":
        return Compared(same_text, options.pattern)
    return Math(options.math_deadline_s) if options.score == "math" else Yours(options.score)


def same_number(said: str, answer: str) -> bool:
    """Of the last number in each."""
    number, wanted = last_number(said), last_number(answer)
    return number is not None and wanted is not None and abs(number - wanted) <= TOLERANCE * max(1.0, abs(wanted))


def same_text(said: str, answer: str) -> bool:
    """But for white space at both ends."""
    return said.strip() == answer.strip()

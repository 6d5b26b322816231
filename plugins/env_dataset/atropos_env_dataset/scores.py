"""How a reply is compared with a row's answer."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from inspect import Parameter, isawaitable, signature
from typing import Any

from atropos_core.builtin.numbers import answer_value, is_same, last_value, stated_answer
from atropos_core.errors import ConfigError, DataError, DeadlineExceeded
from atropos_core.interfaces import Score
from atropos_core.plugins.references import load_reference
from atropos_core.processes.function_worker import Worker
from atropos_core.rollouts.replies import searched, whole_reply
from atropos_core.rollouts.row_files import value_at
from atropos_core.types import Message, Task
from atropos_env_dataset.config import DatasetOptions

NOT_COLUMNS = ("prompt", "completion", "completion_ids")  # of a row, in TRL
OF_TRLS_TRAINER = ("completion_ids", "trainer_state", "log_extra", "log_metric", "environments")
LONGEST = 10_000  # characters of the end of a reply that math-verify reads
DIGITS = re.compile(r"-?[\d,]{1,300}(?:\.\d{1,300})?", re.ASCII)  # which math-verify can read
MATH = "atropos_env_dataset.math_answers:equal"


class Scorer:
    async def check(self, tasks: Iterable[Task], source: str) -> None:
        """Raises DataError if answers cannot be compared with anything. `source`: the file that the tasks are of."""

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
        said = self._said(reply)
        correct = said is not None and self._same(said, task.answer or "")
        metrics = {} if self._pattern is None else {"answered": float(said is not None)}
        return Score(float(correct), correct=correct, metrics=metrics)

    def _said(self, reply: Message) -> str | None:
        if self._pattern is None:
            return str(reply.get("content") or "")
        *_, last = [None, *self._pattern.finditer(searched(reply, self._pattern.pattern))]
        return None if last is None else last[1 if self._pattern.groups else 0] or ""


class Numeric(Compared):
    def __init__(self, pattern: str | None) -> None:
        super().__init__(same_last_number, pattern)

    async def check(self, tasks: Iterable[Task], source: str) -> None:
        wrong = []
        for task in tasks:
            try:
                answer_value(task.answer or "")
            except ValueError as error:
                wrong.append((task, str(error)))
        refuse(
            wrong,
            source,
            'Leave one number there, or end the answer in "#### 12". score = "math" compares expressions, score = "exact" texts.',
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

    async def check(self, tasks: Iterable[Task], source: str) -> None:
        said: dict[str, str | bool] = {}
        wrong = []
        for task in tasks:
            answer = task.answer or ""
            if answer not in said:
                said[answer] = DIGITS.fullmatch(stated_answer(answer) or answer) is not None or await self._read(answer)
            if said[answer] is not True:
                wrong.append((task, str(said[answer])))
        refuse(
            wrong,
            source,
            r"Leave only the expression there, in LaTeX, or put it in \boxed{} and words in \text{}; else leave the row out.",
        )

    async def _read(self, answer: str) -> str | bool:
        try:
            read: str | bool = await self._worker.call(answer, None, deadline_s=self._deadline_s)
        except DeadlineExceeded:
            return "takes too long to compute"
        return read

    async def score(self, task: Task, reply: Message) -> Score:
        text = str(reply.get("content") or "")[-LONGEST:]
        try:
            correct = await self._worker.call(task.answer or "", text, deadline_s=self._deadline_s)
        except DeadlineExceeded:
            return Score(0.0, correct=False, metrics={"math_timeouts": 1.0})
        if isinstance(correct, str):
            raise DataError(f"dataset: the answer of task {task.id} {correct}: {task.answer!r:.80}")
        return Score(float(correct), correct=correct, metrics={"math_timeouts": 0.0})

    async def close(self) -> None:
        await self._worker.close()


def refuse(wrong: Sequence[tuple[Task, str]], source: str, remedy: str) -> None:
    """Raises DataError for tasks and what their answers are instead, if there are any."""
    if wrong:
        task, what = wrong[0]
        others = f" {len(wrong) - 1} others cannot be compared either." if len(wrong) > 1 else ""
        raise DataError(f"{source}: the answer of task {task.id} {what}: {task.answer!r:.80}.{others}", remedy=remedy)


class Yours(Scorer):
    """A function, or a coroutine function. What it is given, its parameters say: (task, reply), or what TRL or verl give."""

    def __init__(self, reference: str, prompt: str) -> None:
        self._name = reference
        self._function: Callable[..., Any] = load_reference(reference)
        if not callable(self._function):
            raise ConfigError(f"dataset: score = {reference!r} is {self._function!r:.80}, and not a function.")
        names = signature(self._function).parameters
        needed = [name for name in OF_TRLS_TRAINER if name in names and names[name].default is Parameter.empty]
        if "completions" in names and needed:
            raise ConfigError(
                f"dataset: score = {reference!r} takes {needed[0]}, which only TRL's trainer has: here it is given prompts, completions "
                "and the columns of the row.",
                remedy=f"Give it a default, {needed[0]}=None, where it can do without.",
            )
        self._call = (
            partial(of_trl, prompt) if "completions" in names else of_verl if "solution_str" in names else of_ours
        )

    async def score(self, task: Task, reply: Message) -> Score:
        made = self._call(self._function, task, reply)
        given = await made if isawaitable(made) else made
        try:
            return as_score(given)
        except (TypeError, ValueError, OverflowError) as error:
            raise DataError(
                f"dataset: {self._name} gave {given!r:.80} for task {task.id}, which is not a score.",
                remedy="Return a finite number. A function in TRL's form leaves a reply unscored with None in its list.",
            ) from error


def as_score(given: Any) -> Score:
    """A score in any of the forms: a number, a Score, TRL's list of one (None abstains), verl's table. Raises TypeError, ValueError or
    OverflowError for anything else."""
    if hasattr(given, "__len__") and not isinstance(given, dict | str) and getattr(given, "ndim", True):
        [given] = given
        if given is None:
            return Score(0.0, abstains=True)
    if isinstance(given, dict) and "score" in given:
        given = Score(given["score"], correct=bool(given["acc"]) if "acc" in given else None)
    score = given if isinstance(given, Score) else Score(given)
    if isinstance(score.value, str) or not math.isfinite(value := float(score.value)):
        raise ValueError("it is not a finite number")
    return replace(score, value=value)


def of_ours(function: Callable[..., Any], task: Task, reply: Message) -> Any:
    return function(task, reply)


def of_trl(prompt: str, function: Callable[..., Any], task: Task, reply: Message) -> Any:
    """TRL's reward functions take lists, here of one each: of texts where the row's prompt is one, else of messages; and the row's other
    columns. As from TRL's trainer without `tools`, a completion is the whole reply, reasoning and tool calls included. A message
    also has `tool_calls` if the row has tools."""
    value, text = value_at(task.data, prompt), whole_reply(reply)
    # A cell may hold messages as JSON: then no message has its text.
    is_text = isinstance(value, str) and any(value in str(one.get("content")) for one in task.messages)
    given = value if is_text else list(task.messages)
    calls = {"tool_calls": reply["tool_calls"]} if reply.get("tool_calls") and task.data.get("tools") else {}
    completion = text if is_text else [{"role": "assistant", "content": text, **calls}]
    columns = {name: [value] for name, value in task.data.items() if name not in NOT_COLUMNS}
    return function(prompts=[given], completions=[completion], **columns)


def of_verl(function: Callable[..., Any], task: Task, reply: Message) -> Any:
    """verl's `compute_score` takes the whole reply, and a row's data_source, reward_model.ground_truth and extra_info."""
    truth, extra = value_at(task.data, "reward_model.ground_truth"), task.data.get("extra_info")
    return function(
        data_source=task.data.get("data_source"),
        solution_str=whole_reply(reply),
        ground_truth=task.answer if truth is None else truth,
        extra_info={} if extra is None else extra,
    )


def scorer(options: DatasetOptions) -> Scorer:
    if options.score == "numeric":
        return Numeric(options.pattern)
    if options.score == "exact":
        return Compared(same_text, options.pattern)
    return Math(options.math_deadline_s) if options.score == "math" else Yours(options.score, options.prompt)


def same_last_number(said: str, answer: str) -> bool:
    return is_same(last_value(said), answer_value(answer))


def same_text(said: str, answer: str) -> bool:
    """But for white space at both ends."""
    return said.strip() == answer.strip()

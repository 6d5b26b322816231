"""How a reply is compared with a row's answer."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from inspect import Parameter, isawaitable, signature
from typing import Any

from atropos_core import console
from atropos_core.builtin.numbers import answer_value, is_same, last_value, stated_answer
from atropos_core.errors import ConfigError, DataError, DeadlineExceeded
from atropos_core.group_schema import check_part_name
from atropos_core.plugins.references import load_reference
from atropos_core.rollouts.replies import searched, whole_reply
from atropos_core.types import Message, Score, Task
from atropos_env_dataset.config import DatasetOptions
from atropos_env_dataset.rows import place_in
from atropos_env_kit.function_worker import Worker
from atropos_env_kit.row_files import columns_in, value_at

NOT_COLUMNS = ("prompt", "completion", "completion_ids", "trainer_state", "log_metric", "log_extra")  # of a row, in TRL
NOT_GIVEN = ("completion_ids", "trainer_state")  # which TRL's trainer gives to every function
VARIABLE = (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)
BY_NAME = (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)
NO_REPLY: Message = {"role": "assistant", "content": ""}
FORMS = (
    "Its parameters say how it is called: (task, reply); (completions, **kwargs) as in TRL; (data_source, solution_str, ground_truth, "
    "extra_info) as in verl. A decorator keeps them with functools.wraps."
)
BYTES = str | bytes | bytearray | memoryview  # float() reads numbers in these
LISTED = 20  # rows that a refusal names
LONGEST = 10_000  # characters of the end of a reply that math-verify reads
DIGITS = re.compile(r"-?[\d,]{1,300}(?:\.\d{1,300})?", re.ASCII)  # which math-verify can read
MATH = "atropos_env_dataset.math_answers:equal"


class Scorer:
    remedy = ""  # for answers that it cannot read

    async def check(self, tasks: Iterable[Task], places: Mapping[int, str]) -> None:
        """Raises DataError if rows lack what the score needs. `places`: the file and line of each task, by its `id()`."""

    async def unreadable(self, tasks: Iterable[Task]) -> list[tuple[Task, str]]:
        """The tasks whose answers cannot be compared with anything, each with the reason."""
        return []

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

    remedy = 'Leave one number there, or end the answer in "#### 12". score = "math" compares expressions, score = "exact" texts. '

    async def unreadable(self, tasks: Iterable[Task]) -> list[tuple[Task, str]]:
        wrong = []
        for task in tasks:
            try:
                answer_value(task.answer or "")
            except ValueError as error:
                wrong.append((task, str(error)))
        return wrong


class Math(Scorer):
    """Compare with math-verify, in a separate process, since sympy may never finish. A reply not compared in time is wrong."""

    remedy = r"Leave only the expression there, in LaTeX, or put it in \boxed{} and words in \text{}. "

    def __init__(self, deadline_s: float) -> None:
        if find_spec("math_verify") is None:
            raise ConfigError(
                'dataset: score = "math" needs math-verify, which is not installed.',
                remedy='pip install "atropos-plugin-env-dataset[math]"',
            )
        self._worker = Worker(MATH)
        self._deadline_s = deadline_s

    async def unreadable(self, tasks: Iterable[Task]) -> list[tuple[Task, str]]:
        said: dict[str, str | bool] = {}
        wrong = []
        for task in tasks:
            answer = task.answer or ""
            if answer not in said:
                said[answer] = DIGITS.fullmatch(stated_answer(answer) or answer) is not None or await self._read(answer)
            if said[answer] is not True:
                wrong.append((task, str(said[answer])))
        return wrong

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


async def readable(
    tasks: Sequence[Task], scorer: Scorer, source: str, places: Mapping[int, str], *, leave_out: bool
) -> Sequence[Task]:
    """The tasks whose answers can be compared with a reply. The others are left out with a line that counts them, or raise DataError.
    `places`: the file and line of each task, by its `id()`."""
    await scorer.check(tasks, places)
    wrong = await scorer.unreadable(tasks)
    if not wrong:
        return tasks
    rows = [
        f"  {place_in(places[id(task)], source)}: the answer {what}: {task.answer!r:.80}"
        for task, what in wrong[:LISTED]
    ]
    if len(wrong) > LISTED:
        rows.append(f"  and {len(wrong) - LISTED:,} more")
    said = "\n".join(
        [f"{source}: {len(wrong):,} of {len(tasks):,} rows have an answer that the score cannot read", *rows]
    )
    if not leave_out or len(wrong) == len(tasks):
        raise DataError(
            said, remedy=f"{scorer.remedy}leave_out_unreadable = true leaves such rows out, but not all of a file."
        )
    console.say(f"{said}\n  They are left out.")
    numbers = {id(task) for task, _ in wrong}
    return [task for task in tasks if id(task) not in numbers]


class Yours(Scorer):
    """A function, or a coroutine function. Its parameters say how it is called: with (task, reply), or as TRL or verl call it."""

    def __init__(self, reference: str, prompt: str, *, has_answers: bool = True) -> None:
        """`prompt`: the column with the prompts. `has_answers`: whether the rows are said to have answers."""
        self._name = reference
        self._function: Callable[..., Any] = load_reference(reference)
        if not callable(self._function):
            raise ConfigError(f"dataset: score = {reference!r} is not a function: {self._function!r:.80}.")
        try:
            called = signature(self._function)
        except (TypeError, ValueError):  # of some functions in C
            raise ConfigError(
                f"dataset: score = {reference!r} does not say which parameters it has: {self._function!r:.80}.",
                remedy=f"Write a function that calls it. {FORMS}",
            ) from None
        parameters = called.parameters
        self._takes_all = any(one.kind is Parameter.VAR_KEYWORD for one in parameters.values())
        self._names = {name for name, one in parameters.items() if one.kind in BY_NAME}
        self._needed = [
            name for name, one in parameters.items() if one.default is Parameter.empty and one.kind not in VARIABLE
        ]
        self._arguments = next((form for names, form in THEIRS if names & self._names), None)
        self._is_trls = self._arguments is of_trl
        self._extra_columns: set[str] = set()  # that log_extra was called with
        self._wants_truth = has_answers and self._arguments in (of_verl, of_verls_batch)
        if self._arguments is of_trl:
            self._arguments = partial(of_trl, prompt)
            if lacking := [name for name in (*NOT_GIVEN, "environments") if name in self._needed]:
                raise ConfigError(
                    f"dataset: score = {reference!r} takes {lacking[0]}, which only TRL's trainer has: here it is given prompts, "
                    "completions and the columns of the row.",
                    remedy=f"Give it a default, {lacking[0]}=None, if your function works without it.",
                )
        elif self._arguments is None:
            try:
                called.bind(None, None)
            except TypeError as error:
                raise self._call_error(str(error)) from None
            if not (self._names or self._needed):
                raise self._call_error("it names no parameter")

    def _call_error(self, why: str) -> ConfigError:
        return ConfigError(f"dataset: score = {self._name!r} cannot be called, since {why}.", remedy=FORMS)

    async def check(self, tasks: Iterable[Task], places: Mapping[int, str]) -> None:
        if self._arguments is None:
            return
        for task in tasks:
            given = self._arguments(task, NO_REPLY) | self._of_trainer({})
            if lacking := [name for name in self._needed if name not in given]:
                raise DataError(
                    f"{places[id(task)]} has no column {lacking[0]!r}, which {self._name} takes. "
                    f"Its columns: {', '.join(map(repr, task.data))}.",
                    remedy="Rename the column or the parameter, or give the parameter a default.",
                )
            if self._wants_truth and task.answer is None and value_at(task.data, "reward_model.ground_truth") is None:
                raise DataError(
                    f"{places[id(task)]} has no answer, which {self._name} takes as ground_truth. "
                    f"Its columns: {', '.join(map(repr, columns_in(task.data)))}.",
                    remedy='Name the column, answer = "reward_model.ground_truth" in verl\'s files; answer = "" says that there is none.',
                )

    async def score(self, task: Task, reply: Message) -> Score:
        logged: dict[str, list[float]] = {}
        if self._arguments is None:
            made = self._function(task, reply)
        else:
            given = self._arguments(task, reply)
            taken = {name: one for name, one in given.items() if self._takes_all or name in self._names}
            # it may change what it is given, and the row is scored again
            made = self._function(**deepcopy(taken), **self._of_trainer(logged))
        given = await made if isawaitable(made) else made
        metrics = {name: sum(values) / len(values) for name, values in logged.items()}
        try:
            score = as_score(given)
            return replace(score, metrics={**score.metrics, **metrics}) if metrics else score
        except Exception as error:
            raise DataError(
                f"dataset: {self._name} gave {given!r:.80} for task {task.id}, which is not a score.",
                remedy="Return a finite number. A function in TRL's form leaves a reply unscored with None in its list.",
            ) from error

    def _of_trainer(self, logged: dict[str, list[float]]) -> dict[str, Any]:
        """The arguments that TRL's trainer adds. `logged` receives the values that the function gives to `log_metric`, by name."""
        if not self._is_trls:
            return {}

        def log_metric(name: str, value: float) -> None:
            if not math.isfinite(number := float(value)):
                raise DataError(
                    f"dataset: {self._name} logged {number} as metric {name!r}, which is not a finite number."
                )
            logged.setdefault(name, []).append(number)

        def log_extra(column: str, values: Sequence[Any]) -> None:
            if column not in self._extra_columns:
                self._extra_columns.add(column)
                console.warn(
                    f"dataset: {self._name} logs the column {column!r} with log_extra, and columns are not recorded. "
                    "Log numbers with log_metric."
                )

        logs = {"log_metric": log_metric, "log_extra": log_extra}
        absent = {name: NotHere(name, self._name) for name in NOT_GIVEN if name not in self._names}
        return logs | absent if self._takes_all else {name: one for name, one in logs.items() if name in self._names}


def as_score(given: Any) -> Score:
    """A score in any of the forms: a number, a Score, TRL's list of one (None abstains), verl's table. Raises for anything else:
    TypeError, ValueError or OverflowError for objects of Python, for others what their class raises."""
    if isinstance(given, Iterable) and not isinstance(given, dict | BYTES) and getattr(given, "ndim", True):
        [given] = given
        if given is None:
            return Score(0.0, abstains=True)
    if isinstance(given, dict) and "score" in given:
        given = Score(given["score"], correct=bool(given["acc"]) if "acc" in given else None)
    score = given if isinstance(given, Score) else Score(given)
    if isinstance(score.value, BYTES) or not math.isfinite(value := float(score.value)):
        raise ValueError("it is not a finite number")
    return replace(score, value=value)


class NotHere:
    """An argument that only TRL's trainer has. Any use raises DataError."""

    def __init__(self, name: str, function: str) -> None:
        self._name, self._function = name, function

    def __getattr__(self, attribute: str) -> Any:
        raise DataError(
            f"dataset: {self._function} uses {self._name}, which only TRL's trainer has.",
            remedy=f"Do without it here. A parameter {self._name}=None is left at its default.",
        )

    def __iter__(self) -> Any:
        return self.__getattr__("__iter__")

    def __getitem__(self, key: object) -> Any:
        return self.__getattr__("__getitem__")

    def __len__(self) -> int:
        return int(self.__getattr__("__len__"))


def of_trl(prompt: str, task: Task, reply: Message) -> dict[str, Any]:
    """The arguments as TRL's trainer without `tools` passes them: lists of one each, and the row's other columns. Prompt and
    completion are texts if the row's prompt is a text, else messages. A completion is the whole reply, with reasoning and tool
    calls. A message also has `tool_calls` if the row has tools."""
    value, text = value_at(task.data, prompt), whole_reply(reply)
    # A cell may hold messages as JSON: then no message has its text.
    is_text = isinstance(value, str) and any(value in str(one.get("content")) for one in task.messages)
    given = value if is_text else list(task.messages)
    calls = {"tool_calls": reply["tool_calls"]} if reply.get("tool_calls") and task.data.get("tools") else {}
    completion = text if is_text else [{"role": "assistant", "content": text, **calls}]
    columns = {name: [value] for name, value in task.data.items() if name not in NOT_COLUMNS}
    return columns | {"prompts": [given], "completions": [completion]}


def of_verl(task: Task, reply: Message) -> dict[str, Any]:
    """The arguments of verl's `compute_score`: the whole reply, the row's data_source, reward_model.ground_truth and extra_info, and
    the number of turns, which verl adds."""
    truth, extra = value_at(task.data, "reward_model.ground_truth"), task.data.get("extra_info")
    if extra is None or isinstance(extra, dict):
        extra = {**(extra or {}), "num_turns": 2, "rollout_reward_scores": {}}
    return {
        "data_source": task.data.get("data_source"),
        "solution_str": whole_reply(reply),
        "ground_truth": task.answer if truth is None else truth,
        "extra_info": extra,
    }


def of_verls_batch(task: Task, reply: Message) -> dict[str, Any]:
    """The arguments as verl's reward manager `batch` passes them: lists of one each."""
    one = of_verl(task, reply)
    lists = ("data_sources", "solution_strs", "ground_truths", "extra_infos")
    return {name: [value] for name, value in zip(lists, one.values(), strict=True)}


THEIRS: tuple[tuple[set[str], Callable[..., dict[str, Any]]], ...] = (  # known by one of these parameters
    ({"completions", "completion_ids"}, of_trl),
    ({"solution_str"}, of_verl),
    ({"solution_strs"}, of_verls_batch),
)


class Several(Scorer):
    """The sum of several scores by weight, as TRL's `reward_funcs` and `reward_weights`. Each is a part of the score and the metric
    score/NAME. `correct` is that of the first score that has one. A score that abstains adds nothing; if all do, the sum abstains."""

    def __init__(self, scorers: Mapping[str, Scorer], weights: Sequence[float]) -> None:
        """`scorers`: by the names of their parts. `weights`: one for each."""
        for name in scorers:
            check_part_name(name)
        self._weights = dict(zip(scorers, weights, strict=True))
        self._scorers = scorers
        self.remedy = "".join(one.remedy for one in scorers.values())

    async def check(self, tasks: Iterable[Task], places: Mapping[int, str]) -> None:
        for one in self._scorers.values():
            await one.check(tasks, places)

    async def unreadable(self, tasks: Iterable[Task]) -> list[tuple[Task, str]]:
        found: dict[int, tuple[Task, str]] = {}
        for one in self._scorers.values():
            for task, why in await one.unreadable(tasks):
                found.setdefault(id(task), (task, why))
        return list(found.values())

    async def score(self, task: Task, reply: Message) -> Score:
        scored = {name: await one.score(task, reply) for name, one in self._scorers.items()}
        given = {name: one for name, one in scored.items() if not one.abstains}
        for name, one in given.items():
            if one.turns is not None:
                raise DataError(
                    f"dataset: {name} gave turn rewards, and it is one of several scores.",
                    remedy="Give turn rewards from a single score, or from a reward in [reward.NAME].",
                )
        return Score(
            sum(self._weights[name] * one.value for name, one in given.items()),
            correct=next((one.correct for one in given.values() if one.correct is not None), None),
            parts={part: value for one in given.values() for part, value in one.parts.items()}
            | {name: one.value for name, one in given.items()},
            metrics={metric: value for one in scored.values() for metric, value in one.metrics.items()}
            | {f"score/{name}": one.value for name, one in given.items()},
            abstains=not given,
        )

    async def close(self) -> None:
        for one in self._scorers.values():
            await one.close()


def scorer(options: DatasetOptions) -> Scorer:
    if len(options.scores) == 1:
        return _one(options.scores[0], options)
    names = [one.rpartition(":")[2] for one in options.scores]
    if twice := [name for name in names if names.count(name) > 1]:
        raise ConfigError(
            f"dataset: two scores are called {twice[0]!r}, and each is reported as score/NAME.",
            remedy="Rename one of the functions.",
        )
    scorers = {name: _one(one, options) for name, one in zip(names, options.scores, strict=True)}
    return Several(scorers, options.score_weights or [1.0] * len(names))


def _one(score: str, options: DatasetOptions) -> Scorer:
    if score == "numeric":
        return Numeric(options.pattern)
    if score == "exact":
        return Compared(same_text, options.pattern)
    if score == "math":
        return Math(options.math_deadline_s)
    return Yours(score, options.prompt, has_answers=bool(options.answer))


def same_last_number(said: str, answer: str) -> bool:
    return is_same(last_value(said), answer_value(answer))


def same_text(said: str, answer: str) -> bool:
    """True if the texts are equal, apart from white space at both ends."""
    return said.strip() == answer.strip()

"""Checks of an environment's tasks that do not run them."""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping, Sequence
from time import perf_counter
from typing import Any

from atropos_core.codec import encode_bytes
from atropos_core.errors import DataError
from atropos_core.interfaces import Environment
from atropos_core.types import Split, Task
from atropos_testing.report import RAISED, Report, brief, of_error
from atropos_testing.scripted import ROLES, render_content

LOOKED_AT = 2000  # tasks of a split
PATIENCE_S = 10.0  # a split that makes its tasks slowly is looked at in part
COMPARING_S = 1.0  # for reading the train tasks that were not looked at, to see whether test tasks are among them
SPLITS = (
    "tasks('train') is trained on; tasks('test') is only evaluated, and held-out accuracy is of tasks that were never trained on. "
    "Divide the data once, and give each task to only one of the two, with a unique id."
)
NO_ANSWERS = ("None", "nan", "NaN", "null", "<NA>")  # texts that a missing answer turns into
SAME_PROMPTS = 0.5  # of the held-out questions that are also training questions: above, nothing is held out
DISTINCT = 0.9  # of the training questions, for that to be a mistake


class Looked:
    """The tasks of one split that were checked, by index."""

    def __init__(self, name: Split) -> None:
        self.name = name
        self.size = 0
        self.found: Sequence[Task] = ()  # what tasks() gave
        self.tasks: dict[int, Task] = {}
        self.unread = False  # tasks() raised
        self.problems: list[str] = []  # that kept tasks from being looked at, or made them no tasks
        self.unstable: list[str] = []


def look_at(environment: Environment, name: Split, at: Sequence[int] | None = None) -> Looked:
    """Sample a split as a run uses it: `len` and indexing, each index twice. With `at`, only these indices."""
    split = Looked(name)
    try:
        found = environment.tasks(name)
        if inspect.iscoroutine(found) or not hasattr(found, "__getitem__"):
            split.unread = True
            split.problems.append(f"tasks({name!r}) gives {_kind(found)}: it has no length, or no task at an index")
            return split
        anew = environment.tasks(name)
        split.size, split.found = len(found), found
    except RAISED as error:  # the plugin boundary: an environment's code
        split.unread = True
        split.problems.append(f"tasks({name!r}) raises {of_error(error)}")
        return split
    until = perf_counter() + PATIENCE_S
    for index in _indices(split.size) if at is None else at:
        if perf_counter() > until:
            break
        try:
            task, again = found[index], anew[index]
        except RAISED as error:  # the plugin boundary: an environment's code
            split.problems.append(f"tasks({name!r})[{index}] raises {of_error(error)}")
            continue
        if not isinstance(task, Task):
            split.problems.append(f"tasks({name!r})[{index}] is a {type(task).__name__}, not a Task")
            continue
        if portrait(task) != portrait(again):
            split.unstable.append(f"tasks({name!r})[{index}] is another task each time it is read")
        split.tasks[index] = task
    return split


def check_tasks(report: Report, train: Looked, test: Looked) -> None:
    """Check `tasks`, `stable tasks`, `unique ids` and `splits`."""
    problems = [*train.problems, *test.problems]
    if not train.size and not train.problems:
        problems.append("tasks('train') is empty")
    for split in (train, test):
        for index, task in split.tasks.items():
            problems += [f"{split.name}[{index}] (id {task.id!r}) {wrong}" for wrong in wrong_with(task)]
    looked = len(train.tasks) + len(test.tasks)
    report.check(
        "tasks",
        problems,
        good=f"{train.size:,} train, {test.size:,} test; {looked:,} looked at",
        remedy="tasks(split) returns a sequence, such as a list: a run reads any of its tasks, in any order, and again after a resume. "
        if any(" gives a" in problem for problem in problems)
        else "tasks(split) is called with 'train' and with 'test', and gives tasks for both; [] for 'test' if none are held out."
        if train.unread or test.unread
        else "A Task has a text id, messages of {role, content} that end before the assistant's turn, and an answer or None.",
    )
    said = [str(task.answer).strip() for split in (train, test) for task in split.tasks.values() if task.answer]
    if missing := [text for text in said if text in NO_ANSWERS]:
        report.note(
            "tasks",
            f"{len(missing):,} of {looked:,} tasks have the answer {missing[0]!r}, as text: a policy that says so is right",
            "A task without an answer has answer=None.",
        )
    if not test.size and not test.problems:
        report.note(
            "tasks",
            "tasks('test') is empty: nothing is held out, and a run that is to evaluate stops at once",
            "Keep tasks for it that tasks('train') leaves out, or run with --set evaluation.problems=0.",
        )
    report.check(
        "stable tasks",
        [*train.unstable, *test.unstable],
        good="an index always gives the same task",
        remedy="Derive everything random in a task from its index (atropos_core.seeds.derive), not from a shared generator.",
    )
    doubles = []
    for split in (train, test):
        seen: dict[str, int] = {}
        for index, task in split.tasks.items():
            if task.id in seen:
                doubles.append(f"{split.name}[{seen[task.id]}] and {split.name}[{index}] share the id {task.id!r}")
            seen.setdefault(task.id, index)
    report.check("unique ids", doubles, good="no id twice", remedy="Give every task of a split a unique id.")
    _check_splits(report, train, test)


def wrong_with(task: Task) -> list[str]:
    """Return what prevents a task from being rendered and run."""
    wrong = []
    if not isinstance(task.id, str) or not task.id:
        wrong.append(f"has the id {task.id!r}, not text")
    if not isinstance(task.messages, tuple) or not task.messages:
        return [*wrong, f"has messages={brief(repr(task.messages))}, not a tuple of at least one message"]
    for message in task.messages:
        if not isinstance(message, Mapping) or message.get("role") not in ROLES:
            wrong.append(f"has a message without one of the roles {', '.join(ROLES)}: {brief(repr(message))}")
            return wrong
        try:
            render_content(message)
        except DataError as error:
            wrong.append(str(error))
    if not wrong and not any(render_content(message).strip() for message in task.messages):
        wrong.append("has nothing but blank messages")
    if task.messages[-1].get("role") == "assistant":
        wrong.append("ends in an assistant message: there is nothing left to reply to")
    if task.answer is not None and (not isinstance(task.answer, str) or not task.answer.strip()):
        wrong.append(f"has the answer {task.answer!r}; use None if there is none, text if there is one")
    try:
        encode_bytes(task)
    except DataError as error:
        wrong.append(
            f"cannot be sent to a reward in another process: {error} (text, numbers, lists, dictionaries and arrays have one)"
        )
    return wrong


def _kind(found: object) -> str:
    if inspect.iscoroutine(found):
        found.close()
        return "a coroutine (it must not be an async method)"
    return "a generator" if inspect.isgenerator(found) else f"a {type(found).__name__}"


def portrait(task: Any) -> str:
    """Return a task as text that is equal for equal tasks, also if they contain arrays."""
    return json.dumps(vars(task), default=repr, sort_keys=True) if isinstance(task, Task) else repr(task)


def _check_splits(report: Report, train: Looked, test: Looked) -> None:
    if not test.size:
        if not test.problems:
            report.check("splits", [], good="no tasks are held out, so none can be in both splits", remedy=SPLITS)
        return
    by_id = {task.id: task for task in train.tasks.values()}
    shared = [(task, by_id[task.id]) for task in test.tasks.values() if task.id in by_id]
    leaked = [task for task, other in shared if _question(task) == _question(other)]
    renamed = [task for task, other in shared if _question(task) != _question(other)]
    of = f"{len(test.tasks):,} test tasks"
    problems = []
    if leaked:
        problems.append(
            f"{len(leaked):,} of {of} are train tasks as well, {leaked[0].id!r} among them: held-out accuracy would count "
            "what was trained on"
        )
    if renamed:
        problems.append(f"{len(renamed):,} of {of} have the id of another task in train, {renamed[0].id!r} among them")
    trained = _questions(train)
    held_out = [task for task in test.tasks.values() if task.answer is not None]
    prompts = set(trained)
    same = [task for task in held_out if _question(task) in prompts]
    share = len(same) / max(len(held_out), 1)
    overlap = (
        f"{share:.1%} of the test tasks ({len(same):,} of {len(held_out):,}) are also train tasks"
        + (f", {same[0].id!r} among them" if same else "")
        + (f" ({len(trained):,} of {train.size:,} train tasks compared)" if len(trained) < train.size else "")
        + ": held-out accuracy counts what was trained on"
    )
    # Tasks sampled from a small space repeat themselves in train already, and then repeat in test as well.
    if not leaked and share > SAME_PROMPTS and len(prompts) > DISTINCT * len(trained):
        problems.append(overlap)
    if problems or not same:
        report.check("splits", problems, good="no test task is also in train, by id or by question", remedy=SPLITS)
    else:
        report.note("splits", overlap, SPLITS)


def _questions(split: Looked) -> list[str]:
    """Return the questions with an answer: of all checked tasks, and of as many others of a larger split as time allows."""
    questions = [_question(task) for task in split.tasks.values() if task.answer is not None]
    until = perf_counter() + COMPARING_S
    for index in range(split.size):
        if perf_counter() > until:
            break
        if index in split.tasks:
            continue
        try:
            task = split.found[index]
        except RAISED:  # the plugin boundary: `tasks` says it of those that were looked at
            continue
        if isinstance(task, Task) and task.answer is not None:
            questions.append(_question(task))
    return questions


def _question(task: Task) -> str:
    return json.dumps([task.messages, task.answer], default=repr)


def _indices(size: int) -> Sequence[int]:
    """Return all indices of a small split; of a large one, the ends and an even spread."""
    if size <= LOOKED_AT:
        return range(size)
    edge = LOOKED_AT // 4
    spread = (edge + (size - 2 * edge) * step // (2 * edge) for step in range(2 * edge))
    return [*range(edge), *dict.fromkeys(spread), *range(size - edge, size)]

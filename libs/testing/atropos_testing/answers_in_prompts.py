"""Does a prompt give its own answer away?

A number may be in its question by chance, and every prompt may show the same worked example. So the check measures the excess:
how often a prompt holds its own task's answer, minus how often it holds those of other tasks.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence

from atropos_core.types import Task
from atropos_testing.replies import is_number, stands_in
from atropos_testing.report import Report, brief
from atropos_testing.scripted import render_content

MARKED_SHARE = 0.05  # of tasks whose prompt names its answer as the answer, in excess of chance
PLAIN_SHARE = 0.5  # of tasks whose prompt holds its number somewhere, in excess of chance
LOOKED_AT = 300
OTHERS = 5  # other tasks whose answers each prompt is searched for
SOLUTION_CHARACTERS = 40
_MARKER = (
    r"(?:answer|solution|result|label|target|gold|truth|expected|correct|reference|hint|key|reply with)\w*"
    r"[\"'*`)]*(?:\s+(?:is|to this is|would be|should be))?\s*[:=]{0,2}\s*(?:it is|it's|is)?\s*[\"'*`$(\\]*(?:boxed\{)?\s*"
)
_GOLD = ("answer", "solution", "gold", "target", "rationale", "reference", "label", "truth")


def check_leaks(report: Report, tasks: Sequence[Task]) -> None:
    """Check `no leaks`."""
    answered = [task for task in tasks if task.answer is not None and task.messages]
    if not answered:
        report.note("no leaks", "no task has an answer")
        return
    stride = max(len(answered) // LOOKED_AT, 1)
    answered = answered[::stride][:LOOKED_AT]
    problems = [
        *_excess(answered, _marked, MARKED_SHARE, "is named as the answer in the prompt"),
        *_excess(answered, _in_system, MARKED_SHARE, "stands in the system message"),
    ]
    problems += [
        f"task {task.id!r}: data[{key!r}], the whole solution, stands in the prompt"
        for task in answered
        for key, solution in _solutions(task)
        if solution in prompt_of(task)
    ][:3]
    plain = _excess(answered, _anywhere, PLAIN_SHARE, "stands in the prompt")
    numeric = sum(is_number(str(task.answer)) for task in answered) > len(answered) / 2
    if numeric and not problems:
        problems = plain
    report.check(
        "no leaks",
        problems,
        good=f"none of {len(answered)} prompts gives its answer away",
        remedy="Keep the answer only in Task.answer. If finding it in the prompt is the task itself, skip this check by name.",
    )
    if plain and not numeric and not problems:
        report.note("no leaks", f"{plain[0]}: fine where finding it there is the task")


def prompt_of(task: Task) -> str:
    return "\n".join(render_content(message) for message in task.messages)


def _excess(tasks: Sequence[Task], holds: Callable[[Task, str], bool], most: float, what: str) -> list[str]:
    own = [task for task in tasks if holds(task, str(task.answer))]
    rng = random.Random(0)
    tried = found = 0
    for task in tasks:
        for other in {str(rng.choice(tasks).answer) for _ in range(OTHERS)} - {str(task.answer)}:
            tried += 1
            found += holds(task, other)
    if not tried:
        return []  # every task has the one answer: nothing to compare with
    chance = found / tried
    share = len(own) / len(tasks)
    if not own or share - chance <= most:
        return []
    first = own[0]
    return [
        f"the answer {what} of {share:.0%} of the tasks (other tasks' answers: {chance:.0%}), "
        f"as in {first.id!r}: {brief(prompt_of(first)[-120:], 140)}, answer {first.answer!r}"
    ]


def _marked(task: Task, answer: str) -> bool:
    wanted = re.escape(answer.strip())
    return re.search(_MARKER + wanted + r"(?!\w)(?![.,]\d)", prompt_of(task), re.IGNORECASE) is not None


def _in_system(task: Task, answer: str) -> bool:
    return any(
        stands_in(answer, render_content(message))
        for message in task.messages
        if message.get("role") in ("system", "developer")
    )


def _anywhere(task: Task, answer: str) -> bool:
    return stands_in(answer, prompt_of(task))


def _solutions(task: Task) -> list[tuple[str, str]]:
    """Return long texts that the task keeps as its solution."""
    named = [("answer", task.answer), *((key, value) for key, value in task.data.items() if str(key).lower() in _GOLD)]
    return [
        (key, value.strip())
        for key, value in named
        if isinstance(value, str) and len(value.strip()) >= SOLUTION_CHARACTERS
    ]

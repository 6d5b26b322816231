"""Where an agent's tasks come from: a JSONL file, or another environment."""

from __future__ import annotations

import json
from collections.abc import Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any

from atropos_core.errors import DataError
from atropos_core.types import Message, Split, Task

ITS_OWN = (
    "id",
    "prompt",
    "system",
    "messages",
    "answer",
)  # fields of a line with a meaning; the others are the task's data


def read_tasks(path: Path) -> list[Task]:
    """One task a line. Raises DataError that names file and line."""
    try:
        lines = path.read_text().splitlines()
    except FileNotFoundError:
        raise DataError(f"there is no file of tasks {path}.") from None
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"the tasks of {path} cannot be read: {error}") from error
    found = [_task(line, f"{path}, line {at}", at) for at, line in enumerate(lines, 1) if line.strip()]
    if not found:
        raise DataError(f"{path} has no tasks.", remedy='One a line: {"prompt": "What is 2 + 2?", "answer": "4"}')
    seen: set[str] = set()
    for task in found:
        if task.id in seen:
            raise DataError(
                f"{path}: two tasks have the id {task.id!r:.100}.", remedy="An id names one task: number them."
            )
        seen.add(task.id)
    return found


def split_by_id(tasks: Sequence[Task], held_out: float) -> dict[Split, list[Task]]:
    """`held_out` of them for the test split, by a hash of their ids: whichever tasks are added later, none changes sides."""
    split: dict[Split, list[Task]] = {"train": [], "test": []}
    for task in tasks:
        share = int.from_bytes(blake2b(task.id.encode(), digest_size=8).digest()) / 2**64
        split["test" if share < held_out else "train"].append(task)
    return split


def _task(line: str, where: str, number: int) -> Task:
    try:
        fields = json.loads(line)
    except ValueError as error:
        raise DataError(f"{where} is not JSON: {error}") from error
    if not isinstance(fields, dict):
        raise DataError(f"{where} is not a JSON object, but {line[:80]!r}.")
    answer = fields.get("answer")
    if answer is not None and not isinstance(answer, str | int | float):
        raise DataError(f"{where}: answer must be text or a number, not {answer!r:.80}.")
    return Task(
        id=str(fields.get("id", number)),
        messages=tuple(_messages(fields, where)),
        answer=None if answer is None else str(answer),
        data={name: value for name, value in fields.items() if name not in ITS_OWN},
    )


def _messages(fields: dict[str, Any], where: str) -> list[Message]:
    prompt, messages = fields.get("prompt"), fields.get("messages")
    if (prompt is None) == (messages is None):
        raise DataError(f"{where}: a task has one of prompt (text) and messages (as of OpenAI's chat).")
    if prompt is not None:
        if not isinstance(prompt, str) or not isinstance(fields.get("system", ""), str):
            raise DataError(f"{where}: prompt and system must be text.")
        system = [{"role": "system", "content": fields["system"]}] if fields.get("system") else []
        return [*system, {"role": "user", "content": prompt}]
    if "system" in fields:
        raise DataError(f"{where}: system goes with prompt; in messages it is one of them.")
    if not isinstance(messages, list) or not all(isinstance(one, dict) and "role" in one for one in messages):
        raise DataError(f"{where}: messages must be a list of objects with role and content.")
    return messages

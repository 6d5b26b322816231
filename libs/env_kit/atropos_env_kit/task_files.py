"""Read tasks from files, one per row, and choose which of them are held out."""

from __future__ import annotations

import ast
import json
import re
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from hashlib import blake2b
from math import isfinite
from pathlib import Path
from typing import Any

from atropos_core.errors import DataError
from atropos_core.types import Message, Split, Task
from atropos_env_kit.row_files import Row, read_rows, value_at

ROLES = ("system", "developer", "user", "assistant", "tool", "function")  # of OpenAI's chat; templates leave others out
_QUOTES = r"""\\*["'](?:\\*["'])*"""  # of a text in a text, or written twice
LIKE_MESSAGES = (
    re.compile(  # in whatever form a library prints them: a list, an array, a tuple, bytes, JSON in JSON, a line each
        rf"""\s*(?:(?:array|b)\b)?\W{{0,9}}[\[\{{\("'](?=.*\b(?:content|value)(?:{_QUOTES}\s*[:,]|=)).*"""
        rf"""\b(?:role|from)(?:{_QUOTES}\s*[:,]|=)\s*{_QUOTES}(?:{"|".join((*ROLES, "human", "gpt"))})\\*["']""",
        re.DOTALL,
    )
)
LIKE_TOOLS = re.compile(rf"""\s*(?:array\b)?\W{{0,9}}\{{.*\b(?:name|function){_QUOTES}\s*:""", re.DOTALL)


@dataclass(frozen=True)
class Columns:
    """Names of the columns that have a meaning; other columns go to `Task.data`. A dot leads into a table within a row."""

    prompt: str = "prompt"  # text, or messages as of OpenAI's chat
    answer: str = "answer"  # text or a number. "": the rows have none
    instruction: str = ""  # the system message of rows without their own
    whole_row: bool = False  # `Task.data` also has these columns, unconverted: an answer may be a number or a list


def read_tasks(path: Path, columns: Columns = Columns()) -> list[Task]:
    """Return the tasks of a file, a folder of files or a pattern. Raises DataError that names file and row."""
    return tasks_of(read_rows(path, columns.prompt), str(path), columns)


def tasks_of(rows: Iterable[tuple[str, Row]], source: str, columns: Columns = Columns()) -> list[Task]:
    """Return tasks. `rows` are (position, values). A task's id is its column `id`, or its number, from 1. Raises DataError."""
    found: dict[str, Task] = {}
    places: list[str] = []
    for number, (where, row) in enumerate(rows, 1):
        task = task_of(row, where, number, columns)
        if task.id in found:
            earlier = places[list(found).index(task.id)]
            raise DataError(
                f"{source}: two tasks have the id {task.id!r:.100}. They are {earlier} and {where}.",
                remedy="An id names one task: number them.",
            )
        found[task.id] = task
        places.append(where)
    if not found:
        raise DataError(f"{source} has no tasks.", remedy='One a line: {"prompt": "What is 2 + 2?", "answer": "4"}')
    return list(found.values())


def task_of(row: Row, where: str, number: int, columns: Columns = Columns()) -> Task:
    """Return the task of one row. Raises DataError."""
    answer = value_at(row, columns.answer) if columns.answer else None
    if not isinstance(answer, str | int | float | None):
        if not columns.whole_row:
            raise DataError(f"{where}: {columns.answer} must be text or a number, not {answer!r:.80}.")
        answer = None
    meant = set() if columns.whole_row else {"id", "system", "messages", columns.prompt, columns.answer}
    tools = _tools(row.get("tools"), where)
    return Task(
        id=str(number if row.get("id") is None else row["id"]),
        messages=tuple(_messages(row, where, columns)),
        answer=None if answer is None else _written(answer),
        data={name: value for name, value in row.items() if name not in meant} | ({"tools": tools} if tools else {}),
    )


def _written(answer: str | int | float) -> str:
    """Return the answer as text. A float is written without an exponent, as people and policies write it: 0.00001, not 1e-05."""
    return f"{Decimal(repr(answer)):f}" if isinstance(answer, float) and isfinite(answer) else str(answer)


def split_tasks(
    tasks: Sequence[Task], held_out: float, key: Callable[[Task], str] = lambda task: task.id
) -> dict[Split, list[Task]]:
    """Put `held_out` of them into the test split, by a hash of `key`, so that tasks added later do not change the others' split."""
    split: dict[Split, list[Task]] = {"train": [], "test": []}
    for task in tasks:
        share = int.from_bytes(blake2b(key(task).encode(), digest_size=8).digest()) / 2**64
        split["test" if share < held_out else "train"].append(task)
    return split


def _messages(row: Row, where: str, columns: Columns) -> list[Message]:
    prompt, messages = value_at(row, columns.prompt), row.get("messages")
    if (prompt is None) == (messages is None):
        raise DataError(
            f"{where}: a task has one of {columns.prompt} (text, or messages) and messages (as of OpenAI's chat). "
            f"This one has {', '.join(map(repr, row)) or 'nothing'}."
        )
    system = "" if row.get("system") is None else row["system"]
    if not isinstance(system, str):
        raise DataError(f"{where}: system must be text.")
    name, said = (columns.prompt, prompt) if messages is None else ("messages", messages)
    chat = _written_out(said, where, name) if isinstance(said, str) else said
    if isinstance(chat, str) and messages is None:
        if not chat.strip():
            raise DataError(f"{where}: {name} is blank.", remedy="Leave the row out, or ask something in it.")
        chat = [{"role": "user", "content": chat}]
    elif system:
        raise DataError(f"{where}: system goes with a prompt that is text; in messages it is one of them.")
    chat = _chat(chat, where, name)
    system = _text(system, where) or columns.instruction
    return [{"role": "system", "content": system}, *chat] if system and chat[0]["role"] != "system" else chat


def _written_out(text: str, where: str, name: str) -> Any:
    """Return the messages in a text that is JSON, or a list as Python prints it, as in cells of CSV files; else the text."""
    value = _parsed(text)
    chat = [value] if isinstance(value, dict) else value
    if (
        isinstance(chat, list)
        and chat
        and all(isinstance(one, dict) and "role" in one for one in chat)
        and any("content" in one for one in chat)
    ):
        return chat
    is_record = isinstance(value, dict) and len(value) > 1  # a question may be one that has messages
    if LIKE_MESSAGES.match(text) and not is_record:
        raise DataError(
            f"{where}: {name} is the text of messages, in a form that is not read: {text!r:.80}.",
            remedy="Write it with json.dumps, as a list of objects with role and content. A prompt that only quotes messages is "
            "written as the content of a message.",
        )
    return text


def _parsed(text: str) -> Any:
    """Return the value of a text that is JSON, or a list, tuple or dict of Python; None for any other text."""
    if not text.lstrip().startswith(("[", "{", '"', "(")):
        return None
    with warnings.catch_warnings(action="ignore"):  # of escapes that Python does not know
        for read in (json.loads, ast.literal_eval):
            try:
                value = read(text.strip())
            except (ValueError, SyntaxError, RecursionError, MemoryError):
                continue
            return _parsed(value) if isinstance(value, str) else list(value) if isinstance(value, tuple) else value
    return None


def _tools(given: Any, where: str) -> list[Mapping[str, Any]]:
    """Return the tools in a column, as JSON schemas in OpenAI's form. Several other forms are accepted. Empty for other contents."""
    tools = _parsed(given) if isinstance(given, str) else given
    tools = [tools] if isinstance(tools, dict) and tools.keys() & {"function", "parameters"} else tools
    if isinstance(tools, list):  # of texts, as parquet keeps tools whose parameters differ
        tools = [_parsed(one) if isinstance(one, str) and one.lstrip().startswith("{") else one for one in tools]
    is_list = isinstance(tools, list) and bool(tools) and all(isinstance(one, dict) for one in tools)
    if not is_list and not (isinstance(given, str | list) and LIKE_TOOLS.match(str(given))):
        return []
    made = [_without_none(one) for one in tools or ()] if is_list else []
    made = [one if "function" in one else {"type": "function", "function": one} for one in made]
    if not made or not all(isinstance(one["function"], dict) and one["function"].get("name") for one in made):
        raise DataError(
            f"{where}: tools must be a list of functions, each with a name, not {given!r:.80}.",
            remedy='As OpenAI\'s: [{"type": "function", "function": {"name": "add", "parameters": {...}}}], or rename the column.',
        )
    return made


def _without_none(value: Any) -> Any:
    """Return the value without keys that are None: in parquet, each table has the keys of all others."""
    if isinstance(value, dict):
        return {key: _without_none(one) for key, one in value.items() if one is not None}
    return [_without_none(one) for one in value] if isinstance(value, list) else value


def _chat(messages: Any, where: str, name: str) -> list[Message]:
    if not (
        messages and isinstance(messages, list) and all(isinstance(one, dict) and one.get("role") for one in messages)
    ):
        raise DataError(
            f"{where}: {name} must be text, or a list of objects with role and content, not {messages!r:.80}."
        )
    for one in messages:
        if one["role"] not in ROLES:
            raise DataError(
                f"{where}: a message has the role {one['role']!r:.40}, which chat templates leave out.",
                remedy=f"Roles are {', '.join(ROLES[:4])} and {ROLES[4]}.",
            )
        if one["role"] != "assistant" and one.get("content") is None:
            raise DataError(
                f"{where}: a message of the role {one['role']!r} has no content, which chat templates show as None.",
                remedy="Write its text, or leave the message out.",
            )
    # of parquet every message has the keys of all
    kept = [{key: value for key, value in one.items() if value is not None or key == "content"} for one in messages]
    return [{**one, "content": _text(one["content"], where)} if "content" in one else one for one in kept]


def _text(content: Any, where: str) -> str | None:
    """Return a message's content: text, None next to tool calls, or the joined parts if all are text."""
    if isinstance(content, str):
        try:
            content.encode()
        except UnicodeEncodeError:
            raise DataError(
                f"{where}: a message has half of a surrogate pair in it, which is not a character.",
                remedy="Write the character.",
            ) from None
        return content
    if content is None:
        return content
    parts = content if isinstance(content, list) else [content]
    texts = [part["text"] for part in parts if isinstance(part, dict) and isinstance(part.get("text"), str)]
    if len(texts) < len(parts):
        raise DataError(
            f"{where}: the content of a message must be text, not {content!r:.80}.",
            remedy='Parts may only be {"type": "text", "text": ...}: pictures and sound are not supported.',
        )
    return "".join(texts)

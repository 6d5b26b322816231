"""Tasks in a file, one a row of JSONL, JSON, CSV or parquet, and which of them are held out."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

from atropos_core.errors import DataError
from atropos_core.types import Message, Split, Task

Row = Mapping[str, Any]
ROLES = ("system", "developer", "user", "assistant", "tool", "function")  # of OpenAI's chat; templates leave others out


@dataclass(frozen=True)
class Columns:
    """What the columns of a row are called that have a meaning; the others are `Task.data`. A dot leads into a table within a row."""

    prompt: str = "prompt"  # text, or messages as of OpenAI's chat
    answer: str = "answer"  # text or a number. "": the rows have none
    instruction: str = ""  # the system message of rows that have none of their own
    whole_row: bool = False  # `Task.data` has these columns too, as they stand: an answer may be a number or a list


def read_tasks(path: Path, columns: Columns = Columns()) -> list[Task]:
    """The tasks of a file. Raises DataError that names file and row."""
    return tasks_of(read_rows(path), str(path), columns)


def tasks_of(rows: Iterable[tuple[str, Row]], source: str, columns: Columns = Columns()) -> list[Task]:
    """`rows` are (where it stands, its values). A task's id is its column `id`, or its number, from 1. Raises DataError."""
    found: dict[str, Task] = {}
    for number, (where, row) in enumerate(rows, 1):
        task = task_of(row, where, number, columns)
        if task.id in found:
            raise DataError(
                f"{source}: two tasks have the id {task.id!r:.100}.", remedy="An id names one task: number them."
            )
        found[task.id] = task
    if not found:
        raise DataError(f"{source} has no tasks.", remedy='One a line: {"prompt": "What is 2 + 2?", "answer": "4"}')
    return list(found.values())


def task_of(row: Row, where: str, number: int, columns: Columns = Columns()) -> Task:
    """One row. Raises DataError."""
    answer = value_at(row, columns.answer) if columns.answer else None
    if not isinstance(answer, str | int | float | None):
        if not columns.whole_row:
            raise DataError(f"{where}: {columns.answer} must be text or a number, not {answer!r:.80}.")
        answer = None
    meant = set() if columns.whole_row else {"id", "system", "messages", columns.prompt, columns.answer}
    return Task(
        id=str(number if row.get("id") is None else row["id"]),
        messages=tuple(_messages(row, where, columns)),
        answer=None if answer is None else str(answer),
        data={name: value for name, value in row.items() if name not in meant},
    )


def value_at(row: Row, column: str) -> Any:
    """`reward_model.ground_truth` is found in the table `reward_model`; None where there is none."""
    value: Any = row
    while column and isinstance(value, Mapping):
        if column in value:
            return value[column]
        first, _, column = column.partition(".")
        value = value.get(first)
    return None


def split_tasks(
    tasks: Sequence[Task], held_out: float, key: Callable[[Task], str] = lambda task: task.id
) -> dict[Split, list[Task]]:
    """`held_out` of them for the test split, by a hash of `key`: whichever tasks are added later, none changes sides."""
    split: dict[Split, list[Task]] = {"train": [], "test": []}
    for task in tasks:
        share = int.from_bytes(blake2b(key(task).encode(), digest_size=8).digest()) / 2**64
        split["test" if share < held_out else "train"].append(task)
    return split


def read_rows(path: Path) -> Iterator[tuple[str, Row]]:
    """(where it stands, its values) of each row, by the name's end: .parquet, .csv, .json (a list, or a line each), else JSONL.
    Raises DataError."""
    if path.suffix == ".parquet":
        yield from _parquet(path)
        return
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except FileNotFoundError:
        raise DataError(f"there is no file of tasks {path}.") from None
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"the tasks of {path} cannot be read: {error}") from error
    if path.suffix == ".csv":
        yield from _csv(path, text)
    elif path.suffix == ".json" and text.lstrip().startswith("["):
        for number, row in enumerate(_parse(text, str(path)), 1):
            yield _checked(row, f"{path}, row {number}")
    else:
        for number, line in enumerate(text.split("\n"), 1):  # not splitlines(): a string may have U+2028 in it
            if line.strip():
                where = f"{path}, line {number}"
                yield _checked(_parse(line, where), where)


def _checked(row: Any, where: str) -> tuple[str, Row]:
    if not isinstance(row, dict):
        raise DataError(f"{where} is not a JSON object, but {json.dumps(row)[:80]}.")
    return where, row


def _parse(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where} is not JSON: {error}") from error


def _csv(path: Path, text: str) -> Iterator[tuple[str, Row]]:
    rows = csv.DictReader(io.StringIO(text, newline=""), strict=True)
    try:
        for row in rows:
            where = f"{path}, line {rows.line_num}"
            if None in row or None in row.values():
                raise DataError(f"{where} has more or fewer values than the first line has names.")
            yield where, row
    except csv.Error as error:
        raise DataError(f"{path} is not CSV, after line {rows.line_num}: {error}") from error


def _parquet(path: Path) -> Iterator[tuple[str, Row]]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ModuleNotFoundError as error:
        raise DataError(
            f"{path}: parquet is read by pyarrow, which is not installed.", remedy="pip install pyarrow"
        ) from error
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            number = 0
            for batch in file.iter_batches():
                for row in batch.to_pylist():
                    number += 1
                    yield f"{path}, row {number}", {name: _plain(value) for name, value in row.items()}
    except FileNotFoundError:
        raise DataError(f"there is no file of tasks {path}.") from None
    except (OSError, pyarrow.ArrowException) as error:
        raise DataError(f"{path} cannot be read as parquet: {str(error).splitlines()[0]}") from error


def _plain(value: Any) -> Any:
    """With what JSON has no word for, a date say, as text."""
    if isinstance(value, dict):
        return {key: _plain(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_plain(one) for one in value]
    return value if value is None or isinstance(value, str | int | float | bytes) else str(value)


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
    if isinstance(prompt, str):
        if not prompt.strip():
            raise DataError(f"{where}: {columns.prompt} is blank.", remedy="Leave the row out, or ask something in it.")
        chat: list[Message] = [{"role": "user", "content": prompt}]
    elif system:
        raise DataError(f"{where}: system goes with a prompt that is text; in messages it is one of them.")
    else:
        chat = _chat(messages or prompt, where, columns.prompt if messages is None else "messages")
    system = system or columns.instruction
    return [{"role": "system", "content": system}, *chat] if system and chat[0]["role"] != "system" else chat


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
    # of parquet every message has the keys of all
    kept = [{key: value for key, value in one.items() if value is not None or key == "content"} for one in messages]
    return [{**one, "content": _text(one["content"], where)} if "content" in one else one for one in kept]


def _text(content: Any, where: str) -> str | None:
    """Of a message: text, none beside tool calls, or parts that are text."""
    if content is None or isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else [content]
    texts = [part["text"] for part in parts if isinstance(part, dict) and isinstance(part.get("text"), str)]
    if len(texts) < len(parts):
        raise DataError(
            f"{where}: the content of a message must be text, not {content!r:.80}.",
            remedy='Parts may be {"type": "text", "text": ...} alone: nothing here reads pictures or sound.',
        )
    return "".join(texts)

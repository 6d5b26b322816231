"""The tasks of both splits, from files or the hub."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any

from atropos_core import console
from atropos_core.builtin.numbers import answer_value, is_same
from atropos_core.errors import DataError
from atropos_core.rollouts.prompt_lengths import long_prompts
from atropos_core.rollouts.tokenizer import ChatTokenizer
from atropos_core.types import Split, Task
from atropos_env_dataset.config import DatasetOptions
from atropos_env_kit.row_files import Row, columns_in, plain_row, read_rows, value_at
from atropos_env_kit.task_files import Columns, split_tasks, tasks_of

# Usual names of columns: an error suggests the first that the row has.
PROMPTS = ("question", "problem", "instruction", "query", "input", "text")
ANSWERS = (
    "reward_model.ground_truth", "ground_truth", "solution", "final_answer", "expected_answer", "gold", "target", "label", "output",
    "response",
)  # fmt: skip


def tools_of(task: Task) -> list[Mapping[str, Any]]:
    given = task.data.get("tools")
    return [one for one in given if isinstance(one, Mapping)] if isinstance(given, list) else []


def load(
    options: DatasetOptions, label: str, model: Path | None = None, places: dict[int, str] | None = None
) -> dict[Split, Sequence[Task]]:
    """Read the tasks. `places` receives the file and line of each, by the `id()` of the task. Raises DataError that names file and
    row. The first load from the hub may take minutes."""
    places = {} if places is None else places
    train = _tasks(options, options.tasks, options.split, label, model, places)
    if options.test_tasks is not None or options.test_split is not None:
        test = _tasks(options, options.test_tasks, options.test_split or "", label, model, places)
        return {"train": train, "test": test}
    # rows with the same prompt are on the same side
    found = split_tasks(train, options.held_out, key=lambda task: json.dumps(task.messages, sort_keys=True))
    for split, size in (("train", len(found["train"])), ("test", len(found["test"]))):
        if not size and not (split == "test" and options.held_out == 0):
            raise DataError(
                f"dataset: held_out = {options.held_out} of {len(train)} rows leaves none for the {split} split.",
                remedy="Choose another held_out, or name a file of what is held out: test_tasks.",
            )
    return {"train": found["train"], "test": found["test"]}


def _tasks(
    options: DatasetOptions, path: Path | None, split: str, label: str, model: Path | None, places: dict[int, str]
) -> list[Task]:
    columns = Columns(
        options.prompt, options.answer, options.instruction, whole_row=len(options.compared) < len(options.scores)
    )
    rows, source = (
        (read_rows(path, options.prompt), str(path))
        if path
        else (_hub(options, split), f"{options.hub}, split {split}")
    )
    own: list[str] = []  # the places of the rows, one for each task
    tasks = tasks_of(_checked(rows, options, label, own), source, columns)
    places |= {id(task): where for where, task in zip(own, tasks, strict=True)}
    if options.compared:
        _warn_of_contradictions(tasks, own, source, options.compared[0])
    for where, task in zip(own, tasks, strict=True):
        if task.messages[-1]["role"] == "assistant":
            raise DataError(
                f"{where}: the prompt ends with a reply of the assistant, so that nothing is left to answer.",
                remedy="Leave that message out; what it says may be the column `answer`.",
            )
    return (
        tasks if options.max_prompt_tokens is None else _short_enough(tasks, options.max_prompt_tokens, source, model)
    )


def _warn_of_contradictions(tasks: Sequence[Task], places: Sequence[str], source: str, score: str) -> None:
    """Warn of rows with the same prompt and different answers: a reply that is right for one is wrong for the other."""
    first: dict[bytes, int] = {}  # number of the first row with a prompt, by a digest of the prompt
    found: list[tuple[int, int]] = []
    for number, task in enumerate(tasks):
        prompt = json.dumps([task.messages, task.data.get("tools")], sort_keys=True, default=str)
        before = first.setdefault(blake2b(prompt.encode(), digest_size=16).digest(), number)
        if before != number and not _agree(tasks[before].answer or "", task.answer or "", score):
            found.append((before, number))
    if not found:
        return
    one, other = found[0]
    shown = [f"{place_in(places[at], source)} ({tasks[at].answer!r:.40})" for at in (one, other)]
    more = f" So have {len(found) - 1:,} more rows." if len(found) > 1 else ""
    console.warn(
        f"{source}: {shown[0]} and {shown[1]} have the same prompt and different answers, so a reply that is right for one is wrong for "
        f"the other.{more} Correct one of the two, or leave it out."
    )


def _agree(one: str, other: str, score: str) -> bool:
    if one.strip() == other.strip():
        return True
    if score == "exact":
        return False
    try:
        return is_same(answer_value(one), answer_value(other))
    except ValueError:  # not one number: `readable` says so, or it is an expression
        return True


def place_in(place: str, source: str) -> str:
    """Return the place of a row without the file that was named already: line 3."""
    return place.removeprefix(source).lstrip(", ")


def _short_enough(tasks: list[Task], most: int, source: str, model: Path | None) -> list[Task]:
    assert model is not None, "a run has a model"
    found = long_prompts(tasks, ChatTokenizer(model), most, tools_of)
    if len(found.tokens) == len(tasks):
        raise DataError(
            f"{source}: the prompts of all {len(tasks):,} rows have more than {most:,} tokens (max_prompt_tokens).",
            remedy="Raise it, or leave it out.",
        )
    if found.tokens:
        console.say(
            f"{source}: {len(found.tokens):,} of {len(tasks):,} rows have more than {most:,} tokens, and are left out"
        )
    return [task for number, task in enumerate(tasks) if number not in found.tokens]


def _option(label: str, name: str) -> str:
    """The option's name in a run's `--set`. `atropos check` sets only options of one component, so it has no label."""
    return f"{label}.{name}" if label else name


def _checked(
    rows: Iterator[tuple[str, Row]], options: DatasetOptions, label: str, places: list[str]
) -> Iterator[tuple[str, Row]]:
    """Yield the rows, and add where each is to `places`. Raises DataError for a row without a prompt, or without an answer to compare
    replies with."""
    for where, row in rows:
        if value_at(row, options.prompt) is None and row.get("messages") is None:
            _refuse_null(row, where, (options.prompt, "messages"))
            raise DataError(
                f"{where} has no column {options.prompt!r}. It has {_columns(row)}.",
                remedy=f"Say which column has the prompt, as --set {_option(label, 'prompt')}={_likely(row, PROMPTS)}.",
            )
        if options.compared and value_at(row, options.answer) is None:
            _refuse_null(row, where, (options.answer,))
            others = {
                name: value for name, value in row.items() if name not in (options.prompt, "id", "system", "messages")
            }
            raise DataError(
                f"{where} has no column {options.answer!r}, with which its replies are to be compared. "
                f"Its other columns: {_columns(others)}.",
                remedy=f"Name the column, as --set {_option(label, 'answer')}={_likely(row, ANSWERS)}, or a score of your own.",
            )
        places.append(where)
        yield where, row


def _refuse_null(row: Row, where: str, names: Sequence[str]) -> None:
    """Raises DataError if the row has one of these columns, whose value is known to be missing."""
    if there := [name for name in names if name in columns_in(row)]:
        raise DataError(
            f"{where}: {there[0]} is null or NaN, which is not a value.",
            remedy=f"Write its {there[0]}, or leave the row out.",
        )


def _columns(row: Row) -> str:
    return ", ".join(map(repr, columns_in(row))) or "none"


def _likely(row: Row, names: Sequence[str]) -> str:
    there = columns_in(row)
    return next((name for name in names if name in there), "COLUMN")


def _hub(options: DatasetOptions, split: str) -> Iterator[tuple[str, Row]]:
    try:
        from datasets import load_dataset
    except ModuleNotFoundError as error:
        raise DataError(
            "dataset: hub needs the library `datasets`, which is not installed.",
            remedy='pip install "atropos-plugin-env-dataset[hub]"',
        ) from error
    try:
        rows = load_dataset(options.hub, options.subset, split=split, revision=options.revision)
    except (OSError, ValueError, ImportError) as error:  # the library's errors derive from these
        first = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise DataError(f"dataset: the hub did not give {options.hub}, split {split}: {first}") from error
    for number, row in enumerate(rows, 1):
        yield f"{options.hub}, split {split}, row {number}", plain_row(row)

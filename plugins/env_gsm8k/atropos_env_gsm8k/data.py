"""The sources of problems. If a source is not available, the error names the others: there is no fallback."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from atropos_core.errors import DataError
from atropos_core.types import Message, Split, Task
from atropos_env_gsm8k.config import Gsm8kOptions
from atropos_env_gsm8k.generate import problem
from atropos_env_gsm8k.grading import gold_number
from atropos_env_kit.numbered_tasks import NumberedTasks
from atropos_env_kit.row_files import Row, check_files, read_rows

OTHERS = 'The other sources are source = "path" (JSONL files) and source = "generated" (no data needed).'

LISTED = 20  # problems that a refusal names


def load(options: Gsm8kOptions, split: Split) -> Sequence[Task]:
    """The tasks of a split. Raises DataError. The first load from the hub may take minutes."""
    if options.source == "generated":
        return generated(options, split)
    if options.source == "path":
        assert options.path is not None, "checked by the options"
        rows = _read(options.path / f"{split}.jsonl")
    else:
        rows = _fetch(options, split)
    tasks, wrong = [], []
    for number, row in enumerate(rows):
        try:
            tasks.append(as_task(row, f"{split}-{number}", options.instruction))
        except DataError as error:
            wrong.append(f"  {Exception.__str__(error).removeprefix('gsm8k: ')}")
    if wrong:
        more = [f"  and {len(wrong) - LISTED:,} more"] if len(wrong) > LISTED else []
        raise DataError(
            "\n".join(
                [
                    f"gsm8k: {len(wrong):,} of {len(tasks) + len(wrong):,} problems of the {split} split cannot be read",
                    *wrong[:LISTED],
                    *more,
                ]
            ),
            remedy="Correct these rows or leave them out; each needs a question and an answer that ends in `#### number`.",
        )
    if not tasks:
        raise DataError(f"gsm8k: the {split} split of {options.path or options.dataset} is empty.")
    return tasks


def as_task(row: Row, name: str, instruction: str) -> Task:
    """One problem in GSM8K's schema: question, and an answer that ends in `#### number`."""
    try:
        question, answer = str(row["question"]), str(row["answer"])
    except (KeyError, TypeError):
        raise DataError(
            f"gsm8k: problem {name} needs the keys 'question' and 'answer'; it is {str(row)[:100]}"
        ) from None
    system: list[Message] = [{"role": "system", "content": instruction}] if instruction else []
    return Task(name, (*system, {"role": "user", "content": question}), answer, {"number": gold_number(answer, name)})


def generated(options: Gsm8kOptions, split: Split) -> Sequence[Task]:
    """Problems made when they are read."""

    def make(number: int) -> Task:
        return as_task(problem(split, number, options.seed), f"{split}-{number}", options.instruction)

    return NumberedTasks(options.problems if split == "train" else options.held_out, make)


def check_folder(folder: Path) -> None:
    """Raise DataError if the folder lacks the file of a split, or one cannot be read."""
    for split in ("train", "test"):
        _refuse_missing(folder / f"{split}.jsonl")
        check_files(folder / f"{split}.jsonl")


def _refuse_missing(path: Path) -> None:
    if not os.path.lexists(path):
        raise DataError(
            f'gsm8k: {path} does not exist. source = "path" needs a folder with train.jsonl and test.jsonl.',
            remedy='The other sources are source = "generated" (no data needed) and source = "hub".',
        )


def _read(path: Path) -> Iterator[Row]:
    _refuse_missing(path)
    for _, row in read_rows(path, "question"):
        yield row


def _fetch(options: Gsm8kOptions, split: Split) -> Iterator[Row]:
    try:
        from datasets import load_dataset
    except ModuleNotFoundError as error:
        raise DataError(
            'gsm8k: source = "hub" needs the library `datasets`, which is not installed. ' + OTHERS,
            remedy='pip install "atropos-plugin-env-gsm8k[hub]"',
        ) from error
    try:
        return iter(load_dataset(options.dataset, "main", split=split, revision=options.revision))
    except (OSError, ValueError, ImportError) as error:  # the library's errors derive from these
        first = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise DataError(f"gsm8k: the hub did not give {options.dataset}: {first}", remedy=OTHERS) from error

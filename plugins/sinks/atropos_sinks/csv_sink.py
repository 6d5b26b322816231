"""A table with one row per step and one column per metric, also for metrics that first appear later."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TextIO

from atropos_core import console
from atropos_core.errors import RunDirectoryError
from atropos_core.storage.atomic import sync, unwritable
from atropos_core.types import Metrics, ScoredGroup
from atropos_sinks.config import CsvOptions
from atropos_sinks.file_sink import FileSink

STEP = "step"


class CsvSink(FileSink):
    """Append one line per step.

    If a step brings new metrics, the table is written to a second file with more columns and renamed over the first, so the
    table is never half-written. Most metrics appear within a few steps, so this is rare. A resumed run drops the rows after
    its checkpoint.
    """

    def __init__(self, options: CsvOptions, directory: Path) -> None:
        super().__init__(directory / options.file)
        self._columns: list[str] = []

    async def open(self) -> None:
        try:
            self._rewrite([])
        except OSError as error:
            raise unwritable(self._path, error) from error

    async def step(self, step: int, metrics: Metrics, groups: Sequence[ScoredGroup]) -> None:
        assert self._file is not None, "a sink is opened before it is used"
        try:
            if new := [name for name in metrics if name not in self._columns]:
                self._rewrite(new)
            row = {STEP: step, **{name: repr(float(value)) for name, value in metrics.items()}}
            csv.writer(self._file).writerow([row.get(name, "") for name in self._columns])
            self._file.flush()
        except OSError as error:
            raise unwritable(self._path, error) from error
        self._last = step

    def _rewrite(self, new: Sequence[str]) -> None:
        """Write the rows up to the last step under the present columns and the `new` ones, then open the table to append."""
        if self._file is not None:
            self._file.close()
            self._file = None
        partial = self._path.with_name(f".{self._path.name}.partial")
        kept = -1
        with self._there() as there, partial.open("w", encoding="utf-8", newline="") as file:
            old = csv.reader(
                line for line in there if line.endswith(("\n", "\r"))
            )  # a line that was cut off is not a row
            columns = next(old, [STEP])
            if columns[0] != STEP:
                raise RunDirectoryError(
                    f"{self._path} is not a table of this sink: its first column is {columns[0]!r}.",
                    remedy="Name another file in [sink.csv], or move that one away.",
                )
            self._columns = [*columns, *new]
            writer = csv.writer(file)
            writer.writerow(self._columns)
            for step, row in self._rows(old, len(columns)):
                writer.writerow([*row, *[""] * len(new)])
                kept = step
            file.flush()
            os.fsync(file.fileno())
        partial.replace(self._path)
        sync(self._path.parent)
        if kept < self._last:
            console.warn(
                f"{self._path} ends at step {max(kept, 0)}, before the checkpoint's {self._last}: rows are gone."
            )
        self._file = self._path.open("a", encoding="utf-8", newline="")

    def _there(self) -> TextIO:
        """The table that this run continues: empty in a new run."""
        if self._last < 0 or not self._path.exists():
            return io.StringIO()
        return self._path.open(encoding="utf-8", newline="")

    def _rows(self, reader: Iterator[list[str]], width: int) -> Iterator[tuple[int, list[str]]]:
        """Yield the rows to keep. Steps only rise: rows that a dead run left half-written, or wrote after its checkpoint, end them."""
        before = -1
        for row in reader:
            if len(row) != width or not row[0].isdigit() or not before < (step := int(row[0])) <= self._last:
                return
            yield step, row
            before = step

"""metrics.jsonl as columns, read further as the file grows."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from atropos_core.storage.reading import open_file, parse_json
from atropos_core.storage.run_records import is_step
from atropos_viewer.page_values import number

MARK = 256  # bytes before the place read up to; if they differ, the file was cut back


class MetricsTable:
    """`edition` changes when the file was cut back, as a resume does. A caller with an older edition has steps that are gone."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._begin()

    def _begin(self) -> None:
        self.edition = time.time_ns()
        self.steps: list[int] = []
        self.columns: dict[str, list[float | None]] = {}
        self.broken = 0  # lines
        self._why_unread = ""
        self._offset = 0
        self._mark = b""

    def refresh(self) -> None:
        """Read new lines; the last one only once it is complete."""
        try:
            with open_file(self._path) as file:
                file.seek(self._offset - len(self._mark))
                if file.read(len(self._mark)) != self._mark:
                    self._begin()
                    file.seek(0)
                fresh = file.read()
        except OSError as error:
            if self._offset:
                self._begin()
            self._why_unread = "" if isinstance(error, FileNotFoundError) else error.strerror or str(error)
            return
        fresh = fresh[: fresh.rfind(b"\n") + 1]
        self._offset += len(fresh)
        self._mark = (self._mark + fresh)[-MARK:]
        for line in fresh.splitlines():
            self._add(line)

    def _add(self, line: bytes) -> None:
        try:
            row = parse_json(line)
        except ValueError:
            row = None
        if not isinstance(row, dict) or not is_step(row.get("step")):
            self.broken += 1
            return
        for name, value in row.items():
            if name == "step":
                continue
            column = self.columns.setdefault(name, [])
            column += [None] * (len(self.steps) - len(column))
            column.append(number(value))
        self.steps.append(row["step"])

    def since(self, step: int, edition: int) -> dict[str, Any]:
        """The steps after `step` if the caller has this edition, else all. `columns[name][i]` belongs to `steps[i]`."""
        known = 0
        if edition == self.edition:
            known = next((at for at, one in enumerate(self.steps) if one > step), len(self.steps))
        count = len(self.steps)
        columns = {name: [*values, *[None] * (count - len(values))][known:] for name, values in self.columns.items()}
        return {"edition": str(self.edition), "from": known, "steps": self.steps[known:], "columns": columns}

    def version_before(self, step: int) -> int | None:
        """The policy version that the rollouts of a step should be of. None if it was not recorded."""
        versions = self.columns.get("policy/version", [])
        known = [int(one) for at, one in zip(self.steps, versions, strict=False) if one is not None and at < step]
        return known[-1] if known else 0 if step == 1 else None

    def notices(self) -> list[str]:
        """Notes about the file for the reader, one sentence each."""
        if self._why_unread:
            return [f"metrics.jsonl cannot be read: {self._why_unread}."]
        if self.steps:
            return [f"metrics.jsonl has {self.broken} incomplete lines: they are left out."] if self.broken else []
        if self.broken:
            return [f"metrics.jsonl is damaged: none of its {self.broken} lines is a step."]
        return ["metrics.jsonl has no step yet."]

"""The records that the page reads, by address. The served page and the single file use the same addresses."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from atropos_core.errors import DataError, RunDirectoryError
from atropos_viewer.viewed_run import ViewedRun

MOST_DIGITS = 20  # of a number in an address: no step or edition has more, and file names are limited in length


def newest_run(parent: Path) -> Path:
    """The newest run directory in `parent`. Raises RunDirectoryError if there is none."""
    found = [path.parent for path in parent.glob("*/config.toml")]
    if not found:
        raise RunDirectoryError(
            f"no run was named, and there is none in {parent.absolute()}.",
            remedy="Name one: atropos view DIRECTORY. `atropos run` makes one.",
        )
    return max(found, key=lambda path: (path / "config.toml").stat().st_mtime)


class PageRecords:
    """Several runs. The server's threads call it, one at a time."""

    def __init__(self, directories: Sequence[Path]) -> None:
        """Raises RunDirectoryError."""
        self.runs = [ViewedRun(directory) for directory in dict.fromkeys(directories)]
        self._lock = threading.Lock()

    def get(self, address: str, query: Mapping[str, str]) -> Any:
        """The record at this address. Raises DataError if there is none."""
        with self._lock:
            match address.split("/"):
                case ["runs"]:
                    return [run.overview() for run in self.runs]
                case ["runs", at, "metrics"]:
                    since, edition = _number(query.get("since", "-1")), _number(query.get("edition", "0"))
                    return self._run(at).metrics_since(since, edition)
                case ["runs", at, "rollouts", step]:
                    return self._run(at).rollouts(_number(step)).table()
                case ["runs", at, "rollouts", step, "search"]:
                    return self._run(at).rollouts(_number(step)).search(query.get("text", ""))
                case ["runs", at, "rollouts", step, row]:
                    return self._run(at).rollouts(_number(step)).one(_number(row))
                case ["runs", at, "evaluations", step]:
                    return self._run(at).evaluation(_number(step))
                case _:
                    raise DataError(f"there is nothing at {address[:100]!r}.")

    def _run(self, at: str) -> ViewedRun:
        number = _number(at)
        if not 0 <= number < len(self.runs):
            raise DataError(f"run {number} does not exist: {len(self.runs)} are open.")
        return self.runs[number]


def _number(text: str) -> int:
    digits = text.removeprefix("-")
    if not (digits.isascii() and digits.isdigit() and len(digits) <= MOST_DIGITS):
        raise DataError(f"{text[:100]!r} is not a whole number of up to {MOST_DIGITS} digits.")
    return int(text)

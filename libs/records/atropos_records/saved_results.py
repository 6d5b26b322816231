"""Results of `atropos rescore --save` and `atropos replay --save`, in the run directory, for `atropos view`.

`rescored/NAME.npz` has a row for each rollout, `replayed/NAME.npz` a row for each token of a step. Each is written once, as a whole.
Both hold enough of the records that they were made from to tell if these have changed since.
"""

from __future__ import annotations

import io
import json
import re
import zlib
from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal
from zipfile import BadZipFile

import numpy as np
from numpy.typing import NDArray

from atropos_core.errors import ConfigError, DataError
from atropos_core.storage.atomic import refuse_existing, unwritable, write_whole
from atropos_core.types import Bools, Floats, Tokens

Kind = Literal["rescored", "replayed"]
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
MOST_BYTES = 256 << 20  # of a file's columns
ABOUT = "about"


@dataclass
class RescoredRows:
    """The columns of a rescored file, one row for each rollout."""

    columns: dict[str, array[float]] = field(
        default_factory=lambda: {
            name: array("d")
            for name in ("step", "line", "draw", "reward_before", "reward", "advantage_before", "advantage")
        }
    )

    def add(self, **values: float) -> None:
        for name, column in self.columns.items():
            column.append(values[name])

    def arrays(self) -> dict[str, NDArray[Any]]:
        whole = ("step", "line", "draw")
        return {
            name: np.array(column, np.int64 if name in whole else np.float32) for name, column in self.columns.items()
        }


@dataclass(frozen=True)
class RescoredStep:
    """A step's rollouts in a rescored file. NaN: not scored, or not known."""

    lines: NDArray[np.int64]  # [n] of the step's records
    draws: NDArray[np.int64]
    rewards_before: Floats
    rewards: Floats
    advantages: Floats
    turned: Bools  # in this rollout's group, an advantage changes its sign


@dataclass(frozen=True)
class ReplayedStep:
    """The tokens [N] of a step in a replayed file, in the order of the step's file of tokens. NaN: not scored."""

    ids: int  # a checksum
    before: Floats  # logprobs before the step
    after: Floats  # after the update as it was
    changed: Floats | None  # after the changed one


def result_path(run: Path, kind: Kind, name: str) -> Path:
    """Return the path of a new result. Raises ConfigError for a name that a file cannot have, RunDirectoryError if it is taken."""
    if not NAME.fullmatch(name):
        raise ConfigError(
            f"--save {name!r} cannot be the name of a file.", remedy="Use up to 64 letters, digits, dots and dashes."
        )
    path = run / kind / f"{name}.npz"
    refuse_existing(path, what="result")
    return path


def write_result(path: Path, about: Mapping[str, Any], columns: Mapping[str, NDArray[Any]]) -> None:
    """Write a result as a whole. `about`: values that JSON can hold. Raises DataError if it is too large, RunDirectoryError if it
    cannot be written."""
    size = sum(column.nbytes for column in columns.values())
    if size > MOST_BYTES:
        raise DataError(
            f"the result has {size >> 20:,} MiB, and --save keeps at most {MOST_BYTES >> 20}.",
            remedy="Take fewer steps with --step, or write the rollouts with --out.",
        )
    content = io.BytesIO()
    np.savez_compressed(content, **{ABOUT: np.array(json.dumps(about)), **columns})  # type: ignore[arg-type] # columns by name
    try:
        path.parent.mkdir(exist_ok=True)
        write_whole(path, content.getvalue())
    except OSError as error:
        raise unwritable(path, error) from error


def saved_results(run: Path, kind: Kind) -> list[Path]:
    """Return the files of a run's results, the newest first."""
    found = [path for path in (run / kind).glob("*.npz") if NAME.fullmatch(path.stem)]
    return sorted(found, key=lambda path: (-path.stat().st_mtime_ns, path.name))


class SavedResult:
    """A result that was read. Raises DataError if the file is damaged."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with np.load(path, allow_pickle=False) as file:
                self._columns = {name: file[name] for name in file.files}
            self.about: Mapping[str, Any] = json.loads(str(self._columns.pop(ABOUT)))
            sizes = {len(column) for column in self._columns.values()}
        except (OSError, ValueError, KeyError, TypeError, BadZipFile, zlib.error, EOFError) as error:
            raise DataError(f"{path} is damaged: {type(error).__name__}: {error}.", remedy="Remove it.") from error
        if len(sizes) > 1 or not isinstance(self.about, dict):
            raise DataError(f"{path} is damaged: its columns are not of one length.", remedy="Remove it.")

    def rescored(self, step: int) -> RescoredStep:
        """Return the rollouts of a step; none if it has none."""
        there = self._column("step") == step
        column = {name: self._column(name)[there] for name in self._columns}
        try:
            before, now = column["advantage_before"], column["advantage"]
            draws = column["draw"]
            turned = np.isin(draws, draws[np.sign(before) * np.sign(now) < 0])
            return RescoredStep(
                column["line"], draws, column["reward_before"], column["reward"], now, np.asarray(turned)
            )
        except KeyError as error:
            raise DataError(f"{self.path} is damaged: it has no {error}.", remedy="Remove it.") from error

    def replayed(self, step: int) -> ReplayedStep | None:
        """Return the tokens, if they are of this step."""
        if self.about.get("step") != step:
            return None
        changed = self._column("changed") if "changed" in self._columns else None
        return ReplayedStep(int(self.about.get("ids", -1)), self._column("before"), self._column("after"), changed)

    def _column(self, name: str) -> Any:
        if name not in self._columns:
            raise DataError(f"{self.path} is damaged: it has no column {name!r}.", remedy="Remove it.")
        return self._columns[name]


def checksum(ids: Tokens) -> int:
    """Return a checksum of a step's token ids [N]."""
    return zlib.crc32(np.ascontiguousarray(ids, np.int64).tobytes())

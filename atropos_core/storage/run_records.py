"""Read the settings, metrics and health of a run directory. The run may still be running, and old runs may have recorded less
(docs/records.md).

Everything is read when it is requested, and read again at the next call, so that a caller can follow a running run.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from atropos_core.errors import RunDirectoryError
from atropos_core.storage.reading import parse_json, parse_toml, read_file, read_text
from atropos_core.storage.run_directory import PATHS, RunDirectory

NAMED = ("environment", "reward", "sink")  # tables of tables that readers of a run look into
TABLES = (*NAMED, "training", "engine", "trainer", "health")
METRICS, HEALTH, ROLLOUTS = "metrics.jsonl", "health.jsonl", "rollouts"
ROLLBACKS = "rollbacks.jsonl"
TOOLS = "tools.jsonl"  # in ROLLOUTS


@dataclass(frozen=True)
class MetricTable:
    """Metrics by step, as columns."""

    steps: NDArray[np.int64]  # [n] ascending
    columns: Mapping[str, NDArray[np.float64]]  # [n] each: NaN if a step has no value, or one that is not finite
    broken: int  # damaged or incomplete lines


@dataclass(frozen=True)
class HealthChange:
    """A change of a health check's state, or, under the name "run", an error that ended the run."""

    step: int
    check: str
    state: str  # "ok", "suspect", "ill"
    since: int
    says: str
    remedy: str


@dataclass(frozen=True)
class Rollback:
    """A return to an earlier checkpoint, with a lower weight of a reward that was gamed: one line of rollbacks.jsonl."""

    step: int  # the run's last step before it
    since: int  # the step since when the reward was gamed
    to: int  # the step of the checkpoint
    reward: str
    weight_before: float
    weight: float
    says: str  # the finding
    done: bool = False  # False: the checkpoints and config.toml may still be those from before

    def __str__(self) -> str:
        return (
            f"rolled back from step {self.step} to the checkpoint of step {self.to}, because reward {self.reward!r} was gamed "
            f"since step {self.since}: reward.{self.reward}.weight is now {self.weight:g} (before: {self.weight_before:g})"
        )


class RunRecords:
    """The records in a run directory. Raises RunDirectoryError if it holds no run."""

    def __init__(self, directory: Path) -> None:
        self.run = RunDirectory(directory)
        self.run.require_run()
        self.directory = directory

    @cached_property
    def config(self) -> Mapping[str, Any]:
        """The parsed config.toml. Raises RunDirectoryError if it cannot be read."""
        path = self.directory / "config.toml"
        try:
            config = parse_toml(read_text(path))
            for name in TABLES:
                table = config.get(name, {})
                if not isinstance(table, dict):
                    raise ValueError(f"{name} is not a table")
                if name in NAMED and not all(isinstance(one, dict) for one in table.values()):
                    raise ValueError(f"{name} is not a table of tables")
            return config
        except (ValueError, OSError) as error:
            raise RunDirectoryError(f"{path} cannot be read: {error}") from error

    @property
    def summary(self) -> Mapping[str, Any]:
        """The parsed summary.json, which a run writes at its end; empty if it is missing or damaged."""
        try:
            found = parse_json(read_file(self.directory / "summary.json"))
        except (OSError, ValueError):
            return {}
        return found if isinstance(found, dict) else {}

    @property
    def paths(self) -> Mapping[str, str]:
        """The way of computing the model that each engine and trainer takes, with the reason, by label; empty if unknown."""
        try:
            found = parse_json(read_file(self.directory / PATHS))
        except (OSError, ValueError):
            return {}
        return {str(label): str(text) for label, text in found.items()} if isinstance(found, dict) else {}

    @property
    def finished_steps(self) -> int:
        """The number of steps of a run that ended well; -1 for any other run."""
        steps = self.summary.get("steps", -1)
        return steps if is_step(steps) else -1

    def metrics(self) -> MetricTable:
        """Return the metrics as columns."""
        rows, broken = metric_rows(self.directory)
        names = sorted({name for row in rows for name in row} - {"step"})
        steps = np.array([row["step"] for row in rows], np.int64)
        return MetricTable(
            steps, {name: np.array([row.get(name, math.nan) for row in rows], np.float64) for name in names}, broken
        )

    def health(self) -> list[HealthChange]:
        """Return the lines of health.jsonl; skip one that a crash cut off."""
        return [
            HealthChange(
                row["step"], row["check"], row["state"], row["since"], row.get("says") or "", row.get("do") or ""
            )
            for row in health_rows(self.directory)
        ]

    def rollbacks(self) -> list[Rollback]:
        return rollbacks(self.directory)

    def rollouts_path(self, step: int) -> Path:
        return self.directory / ROLLOUTS / f"step-{step:06d}.jsonl"


def json_rows(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the objects of a JSON-lines file; an empty one for each line that is not an object. Yields nothing without a file."""
    try:
        lines = read_file(path).decode(errors="replace").splitlines()
    except OSError:
        return
    for line in lines:
        try:
            row = parse_json(line)
        except ValueError:
            row = None
        yield row if isinstance(row, dict) else {}


def metric_rows(directory: Path) -> tuple[list[dict[str, float]], int]:
    """Return every step of metrics.jsonl, with NaN for values that are not finite, and the number of broken lines."""
    steps, broken = [], 0
    for row in json_rows(directory / METRICS):
        if is_step(row.get("step")) and all(map(_is_number, row.values())):
            steps.append({name: _number(value) for name, value in row.items()})
        else:
            broken += 1
    return steps, broken


def health_rows(directory: Path) -> list[dict[str, Any]]:
    """Return the complete lines of health.jsonl."""
    return [
        row
        for row in json_rows(directory / HEALTH)
        if is_step(row.get("step"))
        and is_step(row.get("since"))
        and all(isinstance(row.get(name, ""), str) for name in ("check", "state", "says", "do"))
        and {"check", "state"} <= row.keys()
    ]


def rollbacks(directory: Path) -> list[Rollback]:
    """Return the complete lines of rollbacks.jsonl, oldest first; empty if the run never rolled back."""
    return [
        Rollback(**row)
        for row in json_rows(directory / ROLLBACKS)
        if row.keys() == Rollback.__dataclass_fields__.keys()
        and all(is_step(row[name]) for name in ("step", "since", "to"))
        and all(isinstance(row[name], str) for name in ("reward", "says"))
        and all(row[name] is not None and _is_number(row[name]) for name in ("weight_before", "weight"))
    ]


def is_step(value: object) -> bool:
    """Return True if a value of a record can be the number of a step."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63


def _is_number(value: object) -> bool:
    return value is None or (isinstance(value, int | float) and (abs(value) < 1e300 or value != value))


def _number(value: Any) -> float:
    return math.nan if value is None else float(value)

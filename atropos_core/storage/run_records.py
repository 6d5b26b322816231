"""Read the records of a run directory, for a viewer, the doctor or an audit. The run may still be running, and old runs may have
recorded less (docs/records.md).

Everything is read when it is requested, and read again at the next call, so that a caller can follow a running run.
"""

from __future__ import annotations

import fcntl
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from atropos_core.errors import DataError, RunDirectoryError
from atropos_core.storage.reading import numbered, open_file, parse_json, parse_toml, read_file, read_text
from atropos_core.storage.token_file import SequenceTokens, TokenFile
from atropos_core.types import Message

T = TypeVar("T")

NAMED = ("environment", "reward", "sink")  # tables of tables that readers of a run look into
TABLES = (*NAMED, "training", "engine", "trainer", "health")
METRICS, HEALTH, ROLLOUTS = "metrics.jsonl", "health.jsonl", "rollouts"
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
class EpisodeRecord:
    """One line of a step's texts. Fields that older runs did not record are None or empty."""

    line: int  # from 0
    step: int
    draw: int
    task: str
    environment: str
    split: str | None
    task_index: int | None  # of the task in its split
    answer: str | None  # what an oracle would reply to it
    member: int | None  # of its group
    outcome: str | None  # of its group: "trained", "flat", "stale", "dropped", "failed"; None: not recorded
    dropped_by: str  # the transform or rule that kept it from being trained; empty if it was trained
    reward: float | None  # None for a failed rollout
    scored_reward: float | None  # before a transform changed it
    advantage: float | None
    score: float | None  # the environment's own
    parts: Mapping[str, float]
    metrics: Mapping[str, float]
    correct: bool | None
    finish: str | None
    sampled_tokens: int
    versions: tuple[int, ...]  # policy versions that sampled it
    sequences: tuple[int, ...]  # in the file of tokens; several if an agent branched, or history was rewritten
    messages: tuple[Message, ...]  # with tool_calls, if there were any
    failed: str  # why it failed; empty if it did not
    failed_in: str  # "rollout", "reward"
    tools: str | None = None  # the id of the tools that the policy was shown: `RunRecords.tools`


@dataclass(frozen=True)
class EvaluatedSample:
    correct: bool | None
    reward: float | None
    metrics: Mapping[str, float]
    finish: str | None
    sampled_tokens: int
    messages: tuple[Message, ...]
    failed: str
    failed_in: str


@dataclass(frozen=True)
class EvaluatedProblem:
    """One held-out problem of an evaluation."""

    task: str
    environment: str
    correct: int  # of its samples
    total: int
    samples: tuple[EvaluatedSample, ...]


@dataclass(frozen=True)
class ReplySpan:
    """The tokens of one message of the policy."""

    message: int  # in EpisodeRecord.messages
    sequence: int
    start: int
    end: int


class RecordedStep:
    """One recorded step. Reading damaged data raises DataError."""

    def __init__(self, records: RunRecords, step: int) -> None:
        self.step = step
        self.path = records.rollouts_path(step)
        self.tokens_path = self.path.with_suffix(".safetensors")
        self._records = records

    @cached_property
    def episodes(self) -> list[EpisodeRecord]:
        """One record per line, including failed rollouts."""
        return [episode_record(self.path, self.step, line, row) for line, row in enumerate(_whole_rows(self.path))]

    @cached_property
    def tokens(self) -> TokenFile | None:
        """The step's tokens, or None if it has no such file: see `why_no_tokens`."""
        try:
            found = TokenFile(self.tokens_path)
        except DataError:
            if self.tokens_path.exists():
                raise
            return None
        lines = found.column("episodes")
        if lines is not None and len(lines) and not 0 <= lines.min() <= lines.max() < len(self.episodes):
            raise DataError(
                f"{self.tokens_path} has tokens of line {lines.max() + 1}, and {self.path.name} has {len(self.episodes)}.",
                remedy="The two files are not of one run: copy both again.",
            )
        return found

    @property
    def why_no_tokens(self) -> str:
        """The reason why there are no tokens; empty if there are."""
        if self.tokens_path.exists():
            return ""
        jsonl = self._records.config.get("sink", {}).get("jsonl", {})
        if jsonl.get("tokens") is False:
            return "the run does not record tokens: sink.jsonl.tokens is false"
        if any(step < self.step for step in self._records.steps_with_tokens()):
            return "its file of tokens was removed"
        if self._records.steps_with_tokens():
            return "its file of tokens was removed to make room: sink.jsonl.tokens_max_mb bounds them"
        return "the run recorded no tokens: it is of an earlier version, or they were removed"

    def tools(self) -> Mapping[str, list[Mapping[str, Any]]]:
        """The run's tools, see `RunRecords.tools`."""
        return self._records.tools()

    def sequences(self, episode: EpisodeRecord) -> list[SequenceTokens]:
        """Return the token histories of an episode; none if no tokens were recorded."""
        if self.tokens is None:
            return []
        try:
            return [self.tokens.sequence(number) for number in episode.sequences]
        except IndexError as error:
            raise DataError(
                f"{self.path}, line {episode.line + 1}: {error}.",
                remedy="The two files are not of one run: copy both again.",
            ) from error

    def reply_spans(self, episode: EpisodeRecord) -> list[ReplySpan]:
        """Return the tokens of each message of the policy. Empty if unknown: the agent's calls form a tree, or there are no
        tokens."""
        spoken = [number for number, message in enumerate(episode.messages) if message.get("role") == "assistant"]
        sequences = zip(episode.sequences, self.sequences(episode), strict=False)
        replies = [(number, start, end) for number, one in sequences for start, end in one.replies]
        if len(replies) != len(spoken):
            return []
        return [ReplySpan(message, *reply) for message, reply in zip(spoken, replies, strict=True)]


class RunRecords:
    """The records in a run directory. Raises RunDirectoryError if it holds no run."""

    def __init__(self, directory: Path) -> None:
        if not (directory / "config.toml").is_file():
            raise RunDirectoryError(
                f"{directory} is not a run directory: it has no config.toml.", remedy="`ls -t runs` shows the newest."
            )
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
    def is_going_on(self) -> bool:
        """True if a process holds the run's lock."""
        try:
            if not (self.directory / "lock").is_file():
                return False
            with open_file(self.directory / "lock") as file:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
                return False
        except FileNotFoundError:
            return False
        except OSError:
            return True

    @property
    def summary(self) -> Mapping[str, Any]:
        """The parsed summary.json, which a run writes at its end; empty if it is missing or damaged."""
        try:
            found = parse_json(read_file(self.directory / "summary.json"))
        except (OSError, ValueError):
            return {}
        return found if isinstance(found, dict) else {}

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

    def tools(self) -> Mapping[str, list[Mapping[str, Any]]]:
        """Return the JSON schemas of each set of tools that the policy was shown, by id; empty if none are recorded."""
        rows = json_rows(self.directory / ROLLOUTS / TOOLS)
        return {str(row["id"]): row["tools"] for row in rows if isinstance(row.get("tools"), list) and "id" in row}

    def steps(self) -> list[int]:
        """Return the steps with recorded rollouts, in ascending order."""
        return _numbers_of(self.directory / ROLLOUTS, "step-", ".jsonl")

    def steps_with_tokens(self) -> list[int]:
        return _numbers_of(self.directory / ROLLOUTS, "step-", ".safetensors")

    def step(self, step: int) -> RecordedStep:
        """Return a step's records. Raises DataError if it is not recorded."""
        if not is_step(step) or not self.rollouts_path(step).is_file():
            there = self.steps()
            which = f"{len(there)} are, from {there[0]} to {there[-1]}" if there else "no step is"
            raise DataError(f"{self.directory} has no rollouts of step {step}: {which}.")
        return RecordedStep(self, step)

    def evaluation_steps(self) -> list[int]:
        """Return the steps after which held-out problems were evaluated; 0 is before the first step."""
        return _numbers_of(self.directory / ROLLOUTS, "eval-", ".jsonl")

    def checkpoint_steps(self) -> list[int]:
        """Return the steps of the present checkpoints, at most `checkpoint.keep`."""
        return _numbers_of(self.directory / "checkpoints", "step-", "")

    def evaluation(self, step: int) -> list[EvaluatedProblem]:
        """Return an evaluation's problems. Raises DataError for a file that is damaged or missing."""
        path = self.directory / ROLLOUTS / f"eval-{step:06d}.jsonl"
        return [_problem(path, line, row) for line, row in enumerate(_whole_rows(path))]

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


def _whole_rows(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of a file. Raises DataError if it cannot be read, or a line is not a JSON object."""
    try:
        lines = read_file(path).split(b"\n")
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}.") from error
    for number, line in enumerate(lines[:-1] if not lines[-1] else lines):
        try:
            row = parse_json(line)
            if not isinstance(row, dict):
                raise ValueError(f"a {type(row).__name__}, not an object")
        except ValueError as error:
            raise _damaged(path, number, str(error)) from error
        yield row


def episode_record(path: Path | str, step: int, line: int, row: Mapping[str, Any]) -> EpisodeRecord:
    """Parse line `line`, from 0, of `path`, which only the error needs. Raises DataError for damaged data."""
    try:
        return EpisodeRecord(
            line=line,
            step=step,
            draw=int(row["draw"]),
            task=str(row["task"]),
            environment=str(row["environment"]),
            split=_of_type(str, row, "split"),
            task_index=_of_type(int, row, "task_index"),
            answer=_of_type(str, row, "answer"),
            member=_of_type(int, row, "member"),
            outcome=_of_type(str, row, "outcome"),
            dropped_by=str(row.get("dropped_by") or ""),
            reward=_optional(row.get("reward")),
            scored_reward=_optional(row.get("scored_reward", row.get("reward"))),
            advantage=_optional(row.get("advantage")),
            score=_optional(row.get("score")),
            parts=_numbers(row.get("parts")),
            metrics=_numbers(row.get("metrics")),
            correct=_of_type(bool, row, "correct"),
            finish=_of_type(str, row, "finish"),
            sampled_tokens=int(row.get("tokens", 0)),
            versions=tuple(map(int, row.get("versions", ()))),
            sequences=tuple(map(int, row.get("sequences", ()))),
            messages=_messages(row),
            failed=str(row.get("failed", "")),
            failed_in=str(row.get("where", "")),
            tools=_of_type(str, row, "tools"),
        )
    except (KeyError, ValueError, TypeError, ArithmeticError) as error:
        raise _damaged(path, line, f"{type(error).__name__}: {error}") from error


def _problem(path: Path, line: int, row: Mapping[str, Any]) -> EvaluatedProblem:
    try:
        samples = tuple(
            EvaluatedSample(
                correct=_of_type(bool, sample, "correct"),
                reward=_optional(sample.get("reward")),
                metrics=_numbers(sample.get("metrics")),
                finish=_of_type(str, sample, "finish"),
                sampled_tokens=int(sample.get("tokens", 0)),
                messages=_messages(sample),
                failed=str(sample.get("failed", "")),
                failed_in=str(sample.get("where", "")),
            )
            for sample in row["samples"]
        )
        return EvaluatedProblem(
            str(row["task"]), str(row["environment"]), int(row["correct"]), int(row["total"]), samples
        )
    except (KeyError, ValueError, TypeError, AttributeError, ArithmeticError) as error:
        raise _damaged(path, line, f"{type(error).__name__}: {error}") from error


def _messages(row: Mapping[str, Any]) -> tuple[Message, ...]:
    messages = row.get("messages", [])
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        raise ValueError("its messages are not a list of objects")
    return tuple(messages)


def _numbers(values: object) -> Mapping[str, float]:
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise ValueError(f"a {type(values).__name__} where names and numbers should be")
    return {str(name): _number(value) for name, value in values.items()}


def _of_type(kind: type[T], row: Mapping[str, Any], name: str) -> T | None:
    value = row.get(name)
    if value is not None and not isinstance(value, kind):
        raise ValueError(f"{name} is a {type(value).__name__}, not a {kind.__name__}")
    return value


def is_step(value: object) -> bool:
    """Return True if a value of a record can be the number of a step."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63


def _is_number(value: object) -> bool:
    return value is None or (isinstance(value, int | float) and (abs(value) < 1e300 or value != value))


def _number(value: Any) -> float:
    return math.nan if value is None else float(value)


def _optional(value: Any) -> float | None:
    return None if value is None else float(value)


def _numbers_of(folder: Path, prefix: str, suffix: str) -> list[int]:
    return [number for number, _ in numbered(folder, prefix, suffix)]


def _damaged(path: Path | str, line: int, what: str) -> DataError:
    return DataError(
        f"{path} is damaged: line {line + 1}: {what:.300}.",
        remedy="The run did not write this: copy the file again from an intact copy, or remove the line.",
    )

"""Read the recorded rollouts and evaluations of a run directory, for a viewer, an export or an audit. The run may still be running,
and old runs may have recorded less (docs/records.md).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from atropos_core.errors import DataError
from atropos_core.storage.reading import numbered, parse_json, read_file
from atropos_core.storage.run_records import ROLLOUTS, TOOLS, RunRecords, is_step, json_rows
from atropos_core.turn_rewards import turn_rewards
from atropos_core.types import Message, TurnRewards
from atropos_records.step_tokens import SequenceTokens, TokenFile

T = TypeVar("T")


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
    tools: str | None = None  # the id of the tools that the policy was shown: `RolloutRecords.tools`
    turn_rewards: tuple[TurnRewards | None, ...] = ()  # of each sequence, parts of `reward`; empty if it has none
    turn_order: tuple[tuple[int, ...], ...] = ()  # of each sequence, `Rollout.turn_order`; empty: one after the other


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


class RolloutRecords(RunRecords):
    """A run directory with its rollouts and evaluations."""

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


class RecordedStep:
    """One recorded step. Reading damaged data raises DataError."""

    def __init__(self, records: RolloutRecords, step: int) -> None:
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
        """The run's tools, see `RolloutRecords.tools`."""
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
            turn_rewards=tuple(map(_read_turn_rewards, row.get("turn_rewards", ()))),
            turn_order=tuple(tuple(map(int, order)) for order in row.get("turn_order", ())),
        )
    except (KeyError, ValueError, TypeError, ArithmeticError, DataError) as error:
        raise _damaged(path, line, f"{type(error).__name__}: {error}") from error


def _read_turn_rewards(given: Mapping[str, Any] | None) -> TurnRewards | None:
    return None if given is None else turn_rewards(given["ends"], given["values"])


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
    return {str(name): math.nan if value is None else float(value) for name, value in values.items()}


def _of_type(kind: type[T], row: Mapping[str, Any], name: str) -> T | None:
    value = row.get(name)
    if value is not None and not isinstance(value, kind):
        raise ValueError(f"{name} is a {type(value).__name__}, not a {kind.__name__}")
    return value


def _optional(value: Any) -> float | None:
    return None if value is None else float(value)


def _numbers_of(folder: Path, prefix: str, suffix: str) -> list[int]:
    return [number for number, _ in numbered(folder, prefix, suffix)]


def _damaged(path: Path | str, line: int, what: str) -> DataError:
    return DataError(
        f"{path} is damaged: line {line + 1}: {what:.300}.",
        remedy="The run did not write this: copy the file again from an intact copy, or remove the line.",
    )

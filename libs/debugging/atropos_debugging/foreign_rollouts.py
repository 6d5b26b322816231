"""Read files of rollouts that TRL, verifiers or atroposlib wrote, as groups that can be scored again.

- verifiers: `results.jsonl` of an evaluation, one rollout a line. Rollouts of one `example_id` are a group.
- atroposlib: a file of groups (`data_path_to_save_groups`, or of its `process`), one group a line.
- TRL: `completions_00010.parquet` of `log_completions`. Rows of one prompt are a group.

A file is read whole, and counts as one step.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from atropos_core.advantages import group_advantages
from atropos_core.errors import ConfigError, DataError, FitError
from atropos_core.group_schema import LARGEST_REWARD
from atropos_core.storage.reading import parse_json, read_file
from atropos_core.types import UNKNOWN_VERSION, Draw, Episode, Message, Rollout, ScoredGroup, Task, tokens
from atropos_debugging.recorded_groups import SEED, NotRecorded, RecordedGroup, opening
from atropos_records.rollout_records import episode_record

MASKED = -100  # atroposlib's mask of a token that is not trained
OF_TRL = {"step", "prompt", "completion", "advantage"}


@dataclass(frozen=True)
class _Member:
    """One rollout of a file."""

    messages: Sequence[Message]
    reward: float
    parts: Mapping[str, float] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)
    advantage: float | None = None
    rollout: Rollout | None = None
    failed: str = ""

    def __post_init__(self) -> None:
        if not (abs(self.reward) <= LARGEST_REWARD and abs(self.advantage or 0.0) <= LARGEST_REWARD):
            raise ValueError(
                f"a row has the reward {self.reward} and the advantage {self.advantage}: rewards must be finite, and at most "
                f"{LARGEST_REWARD:g}"
            )


@dataclass(frozen=True)
class _Group:
    """One group of a file."""

    task: str
    members: Sequence[_Member]
    answer: str | None = None
    data: Mapping[str, Any] | None = None  # None: not in the file
    step: int = 1
    environment: str = ""


def foreign_groups(path: Path) -> list[RecordedGroup]:
    """Read a file. Raises ConfigError for a file of another kind, DataError for a damaged one."""
    rows = list(_parquet_rows(path) if path.suffix == ".parquet" else _json_rows(path))
    if not rows:
        raise DataError(f"{path} has no rows.")
    first = rows[0]
    readers = {
        "verifiers": ({"example_id", "prompt", "completion", "reward"}, _of_verifiers),
        "atroposlib": ({"tokens", "masks", "scores"}, _of_atroposlib),
        "trl": (OF_TRL, _of_trl),
    }
    for name, (keys, read) in readers.items():
        if keys <= first.keys():
            try:
                return _all_recorded(path, name, list(read(rows)))
            except (KeyError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError) as error:
                said = f"{type(error).__name__}: {error}".replace("\n", " ")
                raise DataError(f"{path} is not what {name} writes: {said:.300}.") from error
    raise ConfigError(
        f"{path} is not a file of rollouts that is known here: its first row has {', '.join(map(repr, sorted(first)))[:200]}.",
        remedy="Name a run directory, or a file of verifiers (results.jsonl), of atroposlib (groups as .jsonl) or of TRL "
        "(completions_*.parquet).",
    )


def _json_rows(path: Path) -> Iterator[dict[str, Any]]:
    try:
        lines = read_file(path).split(b"\n")
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}.") from error
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = parse_json(line)
        except ValueError as error:
            raise DataError(f"{path}, line {number}: {error}.") from error
        if not isinstance(row, dict):
            raise DataError(f"{path}, line {number} is not an object of JSON.")
        yield row


def _parquet_rows(path: Path) -> Iterator[dict[str, Any]]:
    try:
        import pyarrow.parquet
    except ModuleNotFoundError as error:
        raise FitError(
            f"{path}: parquet is read by pyarrow, which is not installed.",
            remedy="pip install 'atropos-records[export]'",
        ) from error
    try:
        yield from pyarrow.parquet.read_table(path).to_pylist()
    except (OSError, ValueError) as error:  # pyarrow's own errors derive from these
        raise DataError(f"{path} cannot be read: {error}.") from error


def _of_verifiers(rows: Sequence[Mapping[str, Any]]) -> Iterator[_Group]:
    by_example: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        by_example.setdefault(json.dumps(row["example_id"]), []).append(row)
    for example, several in by_example.items():
        members = [
            _Member(
                [*_messages(row["prompt"], "user"), *_messages(row["completion"], "assistant")],
                float(row["reward"]),
                metrics={name: float(value) for name, value in (row.get("metrics") or {}).items() if _is_number(value)},
                failed=str(row["error"]) if row.get("error") else "",
            )
            for row in several
        ]
        first = several[0]
        answer = first.get("answer")
        yield _Group(example, members, None if answer is None else str(answer), {"info": first.get("info", {})})


def _of_atroposlib(rows: Sequence[Mapping[str, Any]]) -> Iterator[_Group]:
    for number, row in enumerate(rows):
        messages = row.get("messages") or [()] * len(row["scores"])
        members = [
            _Member(list(said), float(score), rollout=_rollout(ids, mask))
            for ids, mask, score, said in zip(row["tokens"], row["masks"], row["scores"], messages, strict=True)
        ]
        yield _Group(str(number), members, environment=str(row.get("env_id") or ""))


def _rollout(ids: Sequence[int], mask: Sequence[int]) -> Rollout:
    sampled = np.asarray(mask) != MASKED
    return Rollout(tokens(ids), sampled, sampled, None, np.full(len(ids), UNKNOWN_VERSION, np.int32), 1.0)


def _of_trl(rows: Sequence[Mapping[str, Any]]) -> Iterator[_Group]:
    by_prompt: dict[tuple[int, str], list[Mapping[str, Any]]] = {}
    for row in rows:
        by_prompt.setdefault((int(row["step"]), json.dumps(row["prompt"])), []).append(row)
    for number, several in enumerate(by_prompt.values()):
        members = []
        for row in several:
            parts = {name: float(value) for name, value in row.items() if name not in OF_TRL and _is_number(value)}
            given = [
                value for value in parts.values() if not math.isnan(value)
            ]  # a reward that does not apply gives NaN
            if not given or math.isnan(row["advantage"]):
                raise ValueError(f"a row of step {row['step']} has no reward, or no advantage")
            said = [*_messages(row["prompt"], "user"), *_messages(row["completion"], "assistant")]
            members.append(_Member(said, math.fsum(given), parts, advantage=float(row["advantage"])))
        yield _Group(str(number), members, step=int(several[0]["step"]))


def _messages(given: Any, role: str) -> list[Message]:
    """Return a prompt or a completion, which is text or messages, as messages."""
    return [{"role": role, "content": given}] if isinstance(given, str) else list(given or ())


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _all_recorded(path: Path, library: str, groups: Sequence[_Group]) -> list[RecordedGroup]:
    """Return the groups in which at least one rollout ended. Raises DataError if there are none."""
    ended = [one for one in groups if any(not member.failed for member in one.members)]
    if not ended:
        raise DataError(f"{path}: in all {len(groups)} groups, every rollout failed, or there is none.")
    return [_recorded(path, number, one, library) for number, one in enumerate(ended)]


def _recorded(path: Path, number: int, one: _Group, library: str) -> RecordedGroup:
    ended = [member for member in one.members if not member.failed]
    rewards = np.array([member.reward for member in ended], np.float32)
    known = [member.advantage for member in ended if member.advantage is not None]
    advantages = np.array(known, np.float32) if len(known) == len(ended) else group_advantages(rewards)
    outcome = "trained" if advantages.any() else "flat"
    environment = one.environment or library
    shared = {"draw": number, "task": one.task, "environment": environment, "answer": one.answer}
    lines = [
        episode_record(
            path,
            one.step,
            number,
            shared
            | {"member": member, "outcome": outcome, "messages": list(of.messages), "reward": of.reward}
            | {"score": of.reward, "parts": dict(of.parts), "metrics": dict(of.metrics), "advantage": float(advantage)},
        )
        for member, (of, advantage) in enumerate(zip(ended, advantages, strict=True))
    ]
    episodes = tuple(
        Episode(
            () if of.rollout is None else (of.rollout,),
            of.reward,
            None,
            dict(of.parts),
            dict(of.metrics),
            line.messages,
        )
        for of, line in zip(ended, lines, strict=True)
    )
    names = [name for name in ended[0].parts if all(name in of.parts for of in ended)]
    group = ScoredGroup(
        Draw(number, environment, "train", number, SEED),
        Task(one.task, opening(lines[0].messages), one.answer, NotRecorded() if one.data is None else one.data),
        episodes,
        rewards,
        {name: np.array([of.parts[name] for of in ended], np.float32) for name in names},
        advantages=advantages,
    )
    return RecordedGroup(one.step, group, lines, len(one.members) - len(ended))

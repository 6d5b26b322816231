"""A step's two files of rollouts: one line per episode, and columns over all of their tokens (docs/records.md)."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from atropos_core.interfaces import SettledGroup, StepRecord
from atropos_core.storage.token_file import EXPERT_NUMBERS, EXPERTS_KNOWN, KEPT_IDS, KEPT_SIZES, OFFSETS
from atropos_core.types import UNKNOWN_VERSION, Floats, Rollout, TopK, offsets_of

NOTHING = np.float32(np.nan)


def tools_id(tools: Sequence[Mapping[str, Any]]) -> str:
    """Return the id of a set of tools in `tools.jsonl`."""
    return hashlib.sha256(json.dumps(list(tools)).encode()).hexdigest()[:16]


def rows(settled: Sequence[SettledGroup], *, tokens: bool) -> list[dict[str, Any]]:
    """Return one row per episode and per failed rollout. With `tokens`, each row lists its sequences."""
    made: list[dict[str, Any]] = []
    sequence = 0
    for one in settled:
        group = one.group
        shared = {
            "task": group.task.id,
            "environment": group.draw.environment,
            "draw": group.draw.id,
            "split": group.draw.split,
            "task_index": group.draw.index,
            "answer": group.task.answer,
            "outcome": one.outcome,
            "dropped_by": one.dropped_by,
            **({"tools": tools_id(one.tools)} if one.tools else {}),
        }
        advantages = np.full(len(group.episodes), np.nan) if group.advantages is None else group.advantages
        for member, episode in enumerate(group.episodes):
            versions = {int(v) for of in episode.rollouts for v in np.unique(of.policy_version[of.sampled])}
            row: dict[str, Any] = shared | {
                "member": member,
                "reward": float(group.rewards[member]),
                "advantage": float(advantages[member]) if np.isfinite(advantages[member]) else None,
                "score": episode.score,
                "parts": {name: float(values[member]) for name, values in group.parts.items()} | dict(episode.parts),
                "metrics": dict(episode.metrics),
                "correct": episode.correct,
                "finish": episode.finish,
                "tokens": sum(int(rollout.sampled.sum()) for rollout in episode.rollouts),
                "versions": sorted(versions - {UNKNOWN_VERSION}),
                "messages": [dict(message) for message in episode.messages],
            }
            if any(rollout.turns is not None for rollout in episode.rollouts):
                row["turn_rewards"] = [_turns(rollout) for rollout in episode.rollouts]
            if orders := [one.turn_order.tolist() for one in episode.rollouts if one.turn_order is not None]:
                row["turn_order"] = orders
            if one.scored is not None:
                row["scored_reward"] = float(one.scored[member])
            if tokens:
                row["sequences"] = list(range(sequence, sequence + len(episode.rollouts)))
                sequence += len(episode.rollouts)
            made.append(row)
        made += [shared | {"failed": failed.cause, "where": failed.where} for failed in group.failed]
    return made


def _turns(rollout: Rollout) -> dict[str, list[Any]] | None:
    turns = rollout.turns
    return None if turns is None else {"ends": turns.ends.tolist(), "values": turns.values.tolist()}


def token_columns(record: StepRecord) -> dict[str, NDArray[Any]] | None:
    """Return columns over the rollouts of all settled groups, in their order, or None if there are none."""
    rollouts: list[Rollout] = []
    trained: list[NDArray[np.bool_]] = []
    advantages: list[Floats] = []
    lines: list[int] = []
    line = 0
    for one in record.settled:
        counts = one.outcome in ("trained", None)
        for member, episode in enumerate(one.group.episodes):
            for rollout in episode.rollouts:
                rollouts.append(rollout)
                lines.append(line)
                trained.append(rollout.trained if counts else np.zeros(len(rollout.tokens), np.bool_))
                given = None if one.group.advantages is None else one.group.advantages[member]
                advantages.append(_advantages(rollout, given))
            line += 1
        line += len(one.group.failed)
    if not rollouts:
        return None
    sampled = np.concatenate([rollout.sampled for rollout in rollouts])
    columns: dict[str, NDArray[Any]] = {
        OFFSETS: offsets_of([len(rollout.tokens) for rollout in rollouts]),
        "episodes": np.array(lines, np.int32),
        "temperature": np.array([rollout.temperature for rollout in rollouts], np.float32),
        "truncated": np.array([rollout.truncated for rollout in rollouts], np.bool_),
        "ids": np.concatenate([rollout.tokens for rollout in rollouts]),
        "sampled": sampled,
        "trained": np.concatenate(trained),
        "logprobs": np.where(sampled, _joined(rollouts, [rollout.logprobs for rollout in rollouts]), NOTHING),
        "versions": np.where(
            sampled, np.concatenate([rollout.policy_version for rollout in rollouts]), np.int32(UNKNOWN_VERSION)
        ),
        "advantages": np.concatenate(advantages),
    }
    columns |= dict(_of_trainer(record, columns))
    columns["advantages"] = np.where(columns["trained"], columns["advantages"], NOTHING)
    if any(rollout.teacher is not None for rollout in rollouts):
        columns["teacher_logprobs"] = np.concatenate([_of_own(one.tokens, one.teacher) for one in rollouts])
    if kept := [one.kept for one in rollouts if one.kept is not None]:
        columns[KEPT_SIZES] = np.concatenate(
            [np.zeros(len(one.tokens), np.int32) if one.kept is None else one.kept.sizes for one in rollouts]
        )
        columns[KEPT_IDS] = np.concatenate([one.token_ids for one in kept])
    if experts := [one.experts for one in rollouts if one.experts is not None]:
        columns[EXPERTS_KNOWN] = np.concatenate(
            [np.zeros(len(one.tokens), np.bool_) if one.experts is None else one.experts.known for one in rollouts]
        )
        columns[EXPERT_NUMBERS] = np.concatenate([one.numbers for one in experts])
    if any(rollout.ref_logprobs is not None for rollout in rollouts):
        columns["ref_logprobs"] = _joined(rollouts, [rollout.ref_logprobs for rollout in rollouts])
    return columns


def _of_trainer(record: StepRecord, columns: Mapping[str, NDArray[Any]]) -> Iterator[tuple[str, Floats]]:
    """Yield the trainer's columns, reordered from the batch to the groups."""
    starts = [
        (one.batch_start, sum(len(r.tokens) for e in one.group.episodes for r in e.rollouts)) for one in record.settled
    ]
    for name, values in record.token_values.items():
        base = columns["advantages"] if name == "advantages" else np.full(len(columns["ids"]), NOTHING)
        parts, at = [], 0
        for start, length in starts:
            parts.append(base[at : at + length] if start is None else values[start : start + length])
            at += length
        yield name, np.concatenate(parts).astype(np.float32, copy=False)


def _advantages(rollout: Rollout, of_episode: float | None) -> Floats:
    if rollout.advantages is not None:
        return rollout.advantages
    return np.full(len(rollout.tokens), NOTHING if of_episode is None else of_episode, np.float32)


def _joined(rollouts: Sequence[Rollout], columns: Sequence[Floats | None]) -> Floats:
    return np.concatenate(
        [
            np.full(len(rollout.tokens), NOTHING) if column is None else column
            for rollout, column in zip(rollouts, columns, strict=True)
        ]
    )


def _of_own(tokens: NDArray[np.int32], teacher: TopK | None) -> Floats:
    """Return [T] the teacher's logprob of each token; NaN where the teacher has none for it."""
    made = np.full(len(tokens), NOTHING)
    if teacher is not None:
        of = np.repeat(np.arange(len(tokens)), np.diff(teacher.offsets))
        own = teacher.token_ids == tokens[of]
        made[of[own]] = teacher.logprobs[own]
    return made

"""Scored groups in the form of the old Atropos protocol: fourteen keys, lists by sequence, -100 for masked tokens.

A group of an old client is returned unchanged: its rollouts' token columns, and `ScoredGroup.wire` for what only old clients
understand. A group of our own gets the fields that an old trainer needs.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from atropos_core.types import Floats, Rollout, ScoredGroup, TopK

MASKED = -100  # in `masks`: the loss does not count this token
NO_LOGPROB = 1.0  # in `inference_logprobs`, at such a token
MASKED_LOGPROB = "masked_logprob"  # in `ScoredGroup.wire`: the different value that the client used there

KEYS = (
    "tokens", "masks", "scores", "advantages", "ref_logprobs", "messages", "generation_params", "inference_logprobs",
    "overrides", "group_overrides", "images", "env_id", "distill_token_ids", "distill_logprobs",
)  # fmt: skip


def to_wire(group: ScoredGroup) -> dict[str, Any]:
    """Exactly `KEYS`, a sequence for each rollout. Token columns are contiguous arrays, which `plain` turns into lists."""
    members = [(episode, score) for episode, score in zip(group.episodes, group.rewards, strict=True)]
    rollouts = [rollout for episode in group.episodes for rollout in episode.rollouts]
    made: dict[str, Any] = dict.fromkeys(KEYS)
    made["tokens"] = [np.ascontiguousarray(rollout.tokens) for rollout in rollouts]
    made["masks"] = [np.where(rollout.trained, rollout.tokens, MASKED) for rollout in rollouts]
    made["scores"] = [_score(one.score, reward) for one, reward in members for _ in one.rollouts]
    hidden = group.wire.get(MASKED_LOGPROB, NO_LOGPROB)
    if (logprobs := _all_of("logprobs", rollouts)) is not None:
        made["inference_logprobs"] = [
            np.where(rollout.trained, column, np.float32(hidden))
            for rollout, column in zip(rollouts, logprobs, strict=True)
        ]
    if not any(entry.get("set_advantage_to_zero") for entry in group.wire.get("overrides") or ()):
        made["advantages"] = _all_of("advantages", rollouts)  # otherwise the override changed them
    made["ref_logprobs"] = _all_of("ref_logprobs", rollouts)
    if rollouts and all(rollout.teacher is not None for rollout in rollouts):
        teachers = [rollout.teacher for rollout in rollouts if rollout.teacher is not None]
        made["distill_token_ids"] = [_by_position(teacher, teacher.token_ids) for teacher in teachers]
        made["distill_logprobs"] = [_by_position(teacher, teacher.logprobs) for teacher in teachers]
    if any(episode.messages for episode in group.episodes):
        made["messages"] = [[dict(one) for one in episode.messages] for episode, _ in members for _ in episode.rollouts]
    if group.wire:
        made |= {key: value for key, value in group.wire.items() if key in made}
    else:
        made |= _temperatures(rollouts)
    return made


def plain(value: Any) -> Any:
    """The same value with lists of plain numbers instead of arrays, for `json`."""
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, dict):
        return {key: plain(entry) for key, entry in value.items()}
    return [plain(entry) for entry in value] if isinstance(value, (list, tuple)) else value


def line(group: ScoredGroup) -> str:
    """One line of a file of groups, with its end."""
    return json.dumps(plain(to_wire(group)), ensure_ascii=False, default=str, separators=(",", ":")) + "\n"


def _score(own: float, reward: np.float32) -> float:
    """The number that the client sent if it equals the reward in 32 bits, else the reward."""
    return own if np.float32(own) == reward else float(reward)


def _all_of(name: str, rollouts: Sequence[Rollout]) -> list[Floats] | None:
    columns = [getattr(rollout, name) for rollout in rollouts]
    if not columns or any(column is None for column in columns):
        return None
    return [np.ascontiguousarray(column) for column in columns]


def _by_position(teacher: TopK, values: np.ndarray[Any, Any]) -> list[np.ndarray[Any, Any]]:
    at = teacher.offsets.tolist()
    held = np.ascontiguousarray(values)
    return [held[start:end] for start, end in pairwise(at)]


def _temperatures(rollouts: Sequence[Rollout]) -> dict[str, Any]:
    """The temperatures, in the field in which an old trainer looks for them."""
    each = [rollout.temperature for rollout in rollouts]
    if len(set(each)) <= 1:
        return {"generation_params": {"temperature": each[0]}} if each else {}
    return {"overrides": [{"temperature": temperature} for temperature in each]}

"""Choose the episodes of a group that go into an export, and say why the others do not. Rewards are as scored, before any transform
changed them."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from atropos_core.types import Message
from atropos_records.groups import ExportedGroup
from atropos_records.rollout_records import EpisodeRecord

LeftOut = Counter[str]  # by the reason


@dataclass(frozen=True)
class Selection:
    min_reward: float | None = None
    only_correct: bool = False
    best_per_group: int | None = None  # None: all
    min_margin: float = 0.0  # between chosen and rejected, which always differ
    keep_cut_off: bool = False


def usable(group: ExportedGroup, selection: Selection, left_out: LeftOut) -> list[tuple[EpisodeRecord, list[Message]]]:
    """Return the episodes that are one conversation of the policy, each up to its last reply, in the order of the group."""
    kept = []
    for episode in group.episodes:
        messages = [_plain(message) for message in _to_last_reply(episode.messages)]
        if reason := _unusable(group, episode, messages, selection):
            left_out[reason] += 1
        else:
            kept.append((episode, messages))
    return kept


def reward_of(episode: EpisodeRecord) -> float:
    found = episode.reward if episode.scored_reward is None else episode.scored_reward
    assert found is not None, "only a rollout that failed has none, and that is left out"
    return found


def _unusable(
    group: ExportedGroup, episode: EpisodeRecord, messages: Sequence[Message], selection: Selection
) -> str | None:
    if episode.failed or episode.reward is None:
        return "the rollout failed"
    if not messages:
        return "no reply of the policy among its messages"
    if len(episode.sequences) > 1:
        return "several token histories: its messages are not one conversation"
    if episode.finish == "length" and not selection.keep_cut_off:
        return "cut off at the token limit (--keep-cut-off keeps them)"
    try:
        json.dumps(messages, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return "half a surrogate pair in a message, which is not Unicode text"
    return None


def _to_last_reply(messages: Sequence[Message]) -> Sequence[Message]:
    last = max((at for at, message in enumerate(messages) if message.get("role") == "assistant"), default=-1)
    return messages[: last + 1]


def _plain(message: Message) -> Message:
    """Return the message without nulls, and with arguments of tool calls as objects, as chat templates need them."""
    plain = {name: value for name, value in message.items() if value is not None}
    if calls := plain.get("tool_calls"):
        plain["tool_calls"] = [_with_object(call) for call in calls]
    return plain


def _with_object(call: Mapping[str, Any]) -> Mapping[str, Any]:
    function = call.get("function")
    arguments = function.get("arguments") if isinstance(function, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(arguments, str):
        return call
    try:
        found = json.loads(arguments)
    except ValueError:
        return call
    return {**call, "function": {**function, "arguments": found}} if isinstance(found, dict) else call

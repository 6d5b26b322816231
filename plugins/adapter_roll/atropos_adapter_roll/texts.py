"""A conversation as ids: what an environment's policy renders, and what is read back off a prompt.

The trainer has the tokenizer, and the environment here none: its ids are Unicode code points, framed by ids above them.
Nothing that the trainer learns from is made of these ids.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from atropos_core.errors import DataError
from atropos_core.types import Message, Tokens

MESSAGE_START, MESSAGE_END = 0x110000, 0x110001  # around what the environment says, as JSON
REPLIED = 0x110002  # ends a reply; of member m of a group it is REPLIED + m


@dataclass(frozen=True)
class Talk:
    """What a prompt says, from its first message."""

    messages: list[Message]  # replies as they came: reasoning and tool calls in the text
    tools: list[Mapping[str, Any]]


def rendered(messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None) -> Tokens:
    """Raises DataError for what is not JSON."""
    try:
        text = json.dumps({"messages": [dict(message) for message in messages], "tools": list(tools or ())})
    except (TypeError, ValueError) as error:
        raise DataError(f"a message of the environment cannot be passed on as JSON: {error}") from error
    return np.concatenate([[MESSAGE_START], to_ids(text), [MESSAGE_END]]).astype(np.int32)


def replied(text: str, member: int = 0) -> Tokens:
    return np.append(to_ids(text), REPLIED + member).astype(np.int32)


def read(prompt: Tokens) -> Talk:
    """Raises DataError where the ids are not what `rendered` and `replied` gave, one after another."""
    ids = np.asarray(prompt)
    talk = Talk([], [])
    at = 0
    while at < len(ids):
        is_message = ids[at] == MESSAGE_START
        ends = np.flatnonzero(ids[at:] == MESSAGE_END if is_message else ids[at:] >= REPLIED)
        if not len(ends):
            raise _unknown()
        text = to_text(ids[at + is_message : at + ends[0]])
        if is_message:
            block = json.loads(text)
            talk.messages.extend(block["messages"])
            talk.tools.extend(block["tools"])
        else:
            talk.messages.append({"role": "assistant", "content": text})
        at += int(ends[0]) + 1
    if not talk.messages or ids[-1] != MESSAGE_END:
        raise _unknown()
    return talk


def to_ids(text: str) -> Tokens:
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.int32)


def to_text(ids: Tokens) -> str:
    ids = np.asarray(ids)
    if ((ids < 0) | (ids >= MESSAGE_START)).any():
        raise _unknown()
    return ids.astype(np.int32).tobytes().decode("utf-32-le", "surrogatepass")


def member_of(tokens: Tokens) -> int | None:
    """Whose reply ends first in these ids."""
    ends = tokens[tokens >= REPLIED]
    return int(ends[0]) - REPLIED if len(ends) else None


def _unknown() -> DataError:
    return DataError(
        "sample() was given ids that are not what render() and sample() gave: inside ROLL an environment goes on from these."
    )

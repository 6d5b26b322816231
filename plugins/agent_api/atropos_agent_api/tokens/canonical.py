"""Decide if two messages are the same, although a client changed one before sending it back.

Clients reorder the keys of arguments, send them as an object or as text, rename call ids, leave out reasoning and the text next
to calls, trim white space, split one reply into two messages and send "" for None. None of these changes the history. Any other
change does.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import orjson

from atropos_agent_api.calls import read_arguments
from atropos_core.rollouts.replies import AS_SAMPLED
from atropos_core.types import Message

_THINK = re.compile(r"\A\s*<think>(.*?)</think>", re.DOTALL)


@dataclass(frozen=True)
class Unit:
    """One message of a conversation, or several of the assistant's in a row, which are one reply."""

    message: Message  # in the form for rendering: content is text, arguments are objects if they are JSON
    key: bytes  # equal if two messages are the same, except for what `is_same_reply` compares

    @property
    def by_assistant(self) -> bool:
        return bool(self.message["role"] == "assistant")


def units_of(messages: Sequence[Message]) -> list[Unit]:
    merged: list[dict[str, Any]] = []
    for by_assistant, some in groupby(map(plain_message, messages), lambda plain: plain["role"] == "assistant"):
        said = list(some)
        merged += [_joined(said)] if by_assistant else said
    numbers: dict[str, int] = {}  # of calls, in the order in which they were made: their ids may be renamed
    names: dict[str, str] = {}  # of their tools
    units = []
    for plain in merged:
        for call in plain.get("tool_calls", ()):
            names[str(call.get("id") or "")] = call["function"]["name"]
        if plain["role"] == "tool" and not plain.get("name") and plain.get("tool_call_id") in names:
            plain["name"] = names[plain["tool_call_id"]]  # some formats put it before the result
        units.append(Unit(plain, _key(plain, numbers)))
    return units


def plain_message(message: Message) -> dict[str, Any]:
    """The message with content as text (never None or a list of parts) and arguments as objects if they are JSON."""
    plain = {name: value for name, value in message.items() if value is not None}
    plain["content"] = _text(message.get("content"))
    if plain.get("role") != "assistant":
        return plain
    plain.pop("tool_calls", None)
    if calls := message.get("tool_calls"):
        plain["tool_calls"] = [_plain_call(call) for call in calls]
    if not plain.get("reasoning_content"):
        plain.pop("reasoning_content", None)
    return plain


def is_same_reply(sent: Message, sampled: Message) -> bool:
    """For two assistant messages with the same key: True if the reasoning, and the text next to calls, are as sampled or left
    out."""
    (content, reasoning), (own_content, own_reasoning) = _content_and_reasoning(sent), _content_and_reasoning(sampled)
    has_text = not sent.get("tool_calls") or bool(content.strip())
    return (not reasoning.strip() or reasoning.split() == own_reasoning.split()) and (
        not has_text or content.strip() == own_content.strip()
    )


def call_ids(message: Message) -> list[str]:
    """The call ids of one message of the assistant."""
    return [str(call.get("id") or "") for call in message.get("tool_calls") or ()]


def digest(*parts: Any) -> bytes:
    """A digest of bytes, or of JSON values; the order in a mapping does not matter."""
    hashed = hashlib.blake2b(digest_size=16)
    for part in parts:
        data = part if isinstance(part, bytes) else _written(part)
        hashed.update(len(data).to_bytes(8, "little") + data)
    return hashed.digest()


def _key(message: Message, numbers: dict[str, int]) -> bytes:
    role = message["role"]
    if role == "assistant":
        calls = message.get("tool_calls") or []
        for call in calls:
            numbers[str(call.get("id") or f"call {len(numbers)}")] = len(numbers)
        said = [[call["function"]["name"], _canonical(_read(call["function"]["arguments"]))] for call in calls]
        return digest("assistant", said or _content_and_reasoning(message)[0].strip())
    if role == "tool":
        given = str(message.get("tool_call_id") or "")
        return digest("tool", message["content"], numbers.get(given, given))
    return digest(role, message["content"], message.get("name"))


def _content_and_reasoning(message: Message) -> tuple[str, str]:
    """Content and reasoning. Some clients put the reasoning before the content, in <think> and </think>."""
    content, reasoning = str(message.get("content") or ""), str(message.get("reasoning_content") or "")
    if not reasoning and (found := _THINK.match(content)):
        return content[found.end() :], found[1]
    return content, reasoning


def _plain_call(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call.get("function") or {}
    plain = {"type": "function", "function": {"name": function.get("name"), "arguments": _object(function)}}
    return {"id": call["id"], **plain} if call.get("id") else plain


def _object(function: Mapping[str, Any]) -> Any:
    arguments = function.get("arguments")
    if arguments is None or arguments == "":
        return {}
    read = _read(arguments)
    return read if isinstance(read, Mapping) else arguments


def _read(arguments: Any) -> Any:
    if not isinstance(arguments, str):
        return arguments
    read = read_arguments(arguments)
    return arguments.strip() if read is None else read


def _canonical(value: Any) -> Any:
    """The value with whole floats as integers, since JavaScript writes 1.0 as 1."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, Mapping):
        return {key: _canonical(entry) for key, entry in value.items()}
    return [_canonical(entry) for entry in value] if isinstance(value, list | tuple) else value


def _joined(said: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Join consecutive messages of the assistant into one."""
    joined: dict[str, Any] = {}
    for one in said:
        joined.update(one)
    for name in AS_SAMPLED if len(said) > 1 else ():
        joined.pop(name, None)  # it belongs to only one of them
    joined["content"] = "".join(one["content"] for one in said)
    if calls := [call for one in said for call in one.get("tool_calls", ())]:
        joined["tool_calls"] = calls
    if reasoning := "".join(one.get("reasoning_content", "") for one in said):
        joined["reasoning_content"] = reasoning
    return joined


def _text(content: Any) -> str:
    if isinstance(content, str):
        return content
    if isinstance(content, list | tuple):
        return "".join(part if isinstance(part, str) else str(part.get("text") or "") for part in content)
    return ""


def _written(value: Any) -> bytes:
    try:
        return orjson.dumps(value, default=dict, option=orjson.OPT_SORT_KEYS)
    except TypeError:  # a large integer, or half of a surrogate pair; the same JSON at ten times the cost
        return json.dumps(value, sort_keys=True, ensure_ascii=False, separators=(",", ":"), default=dict).encode(
            "utf-8", "surrogatepass"
        )

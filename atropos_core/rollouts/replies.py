"""What a sampled reply says: its ids as the text that environments and rewards read, without the tokens that frame it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from atropos_core.types import Message

SENTINEL = "\u2063reply\u2063"
# What `message_of` reads: such a token is part of the text, though some tokenizers call it special.
READ = frozenset({"<think>", "</think>", "<tool_call>", "</tool_call>"})
NAME_CHARACTERS = 256  # of a tool, at most
_THINK = re.compile(r"\A\s*<think>(.*?)</think>\s*", re.DOTALL)
_TOOL_CALL = re.compile(r"<tool_call>\s*(\{.*?\})\s*</tool_call>", re.DOTALL)
_RECIPIENT = re.compile(r"\bto=(?:functions\.)?([^\s<]+)")


def end_of_turn(conversation: str, added: Iterable[str]) -> str:
    """The added token that a chat template puts after a reply, or nothing. `conversation`: rendered, with `SENTINEL` as the
    content of its last message."""
    _, found, tail = conversation.rpartition(SENTINEL)
    begins = [token for token in added if token and found and tail.lstrip().startswith(token.strip())]
    return max(begins, key=len, default="")


def message_of(text: str) -> Message:
    """The assistant message that a sampled text is. `<think>` and `<tool_call>` blocks become `reasoning_content` and
    `tool_calls`. Each call has a name, a str, and arguments, a dict; one that cannot be read so stays in the content."""
    message: dict[str, Any] = {"role": "assistant", "content": text}
    if found := _THINK.match(text):
        message["reasoning_content"] = found[1].strip()
        text = text[found.end() :]
    calls: list[dict[str, Any]] = []

    def taken(found: re.Match[str]) -> str:
        function = _function_of(found[1])
        if function is None:
            return found[0]
        calls.append({"type": "function", "function": function})
        return ""

    text = _TOOL_CALL.sub(taken, text)
    if calls:
        message["tool_calls"] = calls
    message["content"] = text.strip() if calls or "reasoning_content" in message else text
    return message


def _function_of(call: str) -> dict[str, Any] | None:
    """Name and arguments; None where the JSON has none, or a name that no API takes back in a history. Some models write the arguments
    as JSON in a string."""
    try:
        said = json.loads(call)
        name, arguments = said["name"], said.get("arguments", {})
        arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
    except (ValueError, KeyError, RecursionError):
        return None
    if not isinstance(name, str) or not 0 < len(name) <= NAME_CHARACTERS or not isinstance(arguments, dict):
        return None
    return {"name": name, "arguments": arguments}


@dataclass(frozen=True)
class ReplyReader:
    """Tokens as texts, by id: `special` are no part of the text wherever they stand, `ends` none where they end it (an
    ordinary word may be an end: a newline). `decode`: ids to text, special tokens included."""

    special: Mapping[int, str]
    ends: Mapping[int, str]
    decode: Callable[[list[int]], str]

    def text(self, ids: Sequence[int]) -> str:
        """The message. Where the tokenizer has channels, the analysis becomes a `<think>` block and a call a `<tool_call>`."""
        size = len(ids)
        while size and (ids[size - 1] in self.ends or self._dropped(ids[size - 1])):
            size -= 1
        if any(self.special.get(one) == "<|message|>" for one in ids):
            return self._of_channels(ids[:size])
        return self.decode([one for one in ids[:size] if not self._dropped(one)])

    def end(self, ids: Sequence[int]) -> str:
        """The text of the token that ends these ids, where it is no part of the text."""
        return {**self.ends, **self.special}.get(ids[-1], "") if len(ids) else ""

    def _dropped(self, one: int) -> bool:
        return one in self.special and self.special[one] not in READ

    def _of_channels(self, ids: Sequence[int]) -> str:
        """`<|channel|>NAME to=RECIPIENT<|message|>TEXT<|end|>`, one after another ("OpenAI harmony response format")."""
        pieces: list[tuple[str, list[int]]] = [("", [])]  # a marker, and what stands between it and the next
        for one in ids:
            if self._dropped(one):
                pieces.append((self.special[one], []))
            else:
                pieces[-1][1].append(one)
        thoughts: list[str] = []
        said: list[str] = []
        header = ""
        for marker, content in pieces:
            text = self.decode(content) if content else ""
            recipient = _RECIPIENT.search(header)
            if marker in ("<|start|>", "<|channel|>", "<|constrain|>") or (not marker and _RECIPIENT.search(text)):
                header += f" {text}"
            elif marker != "<|message|>":
                said.append(text)
            else:
                if recipient:
                    said.append(
                        f"<tool_call>{json.dumps({'name': recipient[1], 'arguments': _arguments(text)})}</tool_call>"
                    )
                else:
                    (thoughts if "analysis" in header.split() else said).append(text)
                header = ""
        return (f"<think>{chr(10).join(thoughts)}</think>" if thoughts else "") + "".join(said)


def _arguments(text: str) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text

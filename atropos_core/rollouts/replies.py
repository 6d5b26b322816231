"""Turn sampled ids into the text and message that environments and rewards read, without the tokens that frame them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from atropos_core.types import Message

SENTINEL = "\u2063reply\u2063"
# The tags between which models write their reasoning: of DeepSeek, Qwen, GLM and most others; Hunyuan 3; Gemma 4; Magistral;
# Seed-OSS; Command A; Kimi-VL; Apertus; EXAONE Deep.
THINKING = {
    "<think>": "</think>",
    "<think:opensource>": "</think:opensource>",
    "<|channel>thought": "<channel|>",
    "[THINK]": "[/THINK]",
    "<seed:think>": "</seed:think>",
    "<|START_THINKING|>": "<|END_THINKING|>",
    "\u25c1think\u25b7": "\u25c1/think\u25b7",
    "<|inner_prefix|>": "<|inner_suffix|>",
    "<thought>": "</thought>",
}
TOOL_CALL = ("<tool_call>", "</tool_call>")
# Tags that `message_of` parses: they are part of the text, even if a tokenizer marks them as special.
READ = frozenset({*THINKING, *THINKING.values(), *TOOL_CALL, "<|channel>"})
# Message text that is not marked (`control_tokens`), because a history repeats what a reply contained.
IN_HISTORIES = frozenset({"<think>", "</think>", *TOOL_CALL})
AS_SAMPLED = ("text", "opening")  # keys of a message that only environments and rewards read
NAME_CHARACTERS = 256  # of a tool, at most
DEEPEST = 100  # values in values of a call's arguments: what every template and every client can write down
_READ_TAG = re.compile(
    r"<tool_call>\s*(?P<call>\{.*?\})\s*</tool_call>|"
    + "|".join(re.escape(tag) for tag in (*THINKING, *THINKING.values())),
    re.DOTALL,
)
_WORDS = "|".join(sorted({re.escape(tag.strip("<>[]|/\u25c1\u25b7")) for tag in (*THINKING, *THINKING.values())}))
_SIGNS = r"(?:[^\w\s]|\\[a-z])*"  # of a regular expression
_NAMES_THINKING = re.compile(  # next to a bracket: "I think" does not name a tag
    rf"(?:[<\[\u25c1]|\\x3c){_SIGNS}(?:\w+\|)*(?:{_WORDS})|(?:{_WORDS})(?:\|\w+)*{_SIGNS}(?:[>\]\u25b7]|\\x3e)",
    re.IGNORECASE,
)
_RECIPIENT = re.compile(r"\bto=(?:functions\.)?([^\s<]+)")


def end_of_turn(conversation: str, added: Iterable[str]) -> str:
    """Return the added token that a chat template puts after a reply, or nothing. `conversation` was rendered with `SENTINEL` as the
    content of its last message."""
    _, found, tail = conversation.rpartition(SENTINEL)
    begins = [token for token in added if token and found and tail.lstrip().startswith(token.strip())]
    return max(begins, key=len, default="")


def opening_of(prompt: str) -> str:
    """Return the thinking tag that ends a rendered prompt, so that the reply begins as reasoning; empty if there is none."""
    return next((tag for tag in THINKING if prompt.rstrip().endswith(tag)), "")


def message_of(text: str, opening: str | None = None) -> Message:
    """Parse a sampled text into an assistant message. `opening`: the thinking tag that ends its prompt (`opening_of`); None if the
    prompt is unknown.

    Reasoning becomes `reasoning_content`: text between thinking tags, and text after a tag that is not closed. If the prompt is
    unknown, a closing tag without an opening one ends reasoning that the prompt began. Calls become `tool_calls`, each with a
    name, a str, and arguments, a dict; a call without them stays in the content. If the content is then not all of `text`, the
    message also has `text`, and `opening` if there is one (`whole_reply`).
    """
    content, thoughts, calls = _parts(text, opening)
    message: dict[str, Any] = {"role": "assistant", "content": content}
    if thoughts:
        message["reasoning_content"] = "\n".join(thought.strip() for thought in thoughts)
    if calls:
        message["tool_calls"] = calls
    if message["content"] != text:
        message["text"] = text
        if opening:
            message["opening"] = opening
    return message


def _parts(text: str, opening: str | None, *, keep_calls: bool = False) -> tuple[str, list[str], list[dict[str, Any]]]:
    """Split a sampled text into content, reasoning and calls. With `keep_calls`, calls also stay in the content."""
    rest = text if not opening or text.lstrip().startswith(opening) else opening + text
    content: list[str] = []
    thoughts: list[str] = []
    calls: list[dict[str, Any]] = []
    kept = at = 0  # what is before has been read; where to look further
    while found := _READ_TAG.search(rest, at):
        start, at = found.span()
        if close := THINKING.get(found[0]):
            before, end = rest[kept:start], rest.find(close, at)
            content += [before, "\n"] if before.strip() else [before]
            thoughts.append(rest[at:end] if end >= 0 else rest[at:])
            kept = at = end + len(close) if end >= 0 else len(rest)
        elif found["call"]:
            if (function := _function_of(found["call"])) is not None:
                calls.append({"type": "function", "function": function})
                if not keep_calls:
                    content.append(rest[kept:start])
                    kept = at
        elif opening is None and not thoughts and not calls:
            thoughts.append(rest[:start])
            kept = at
    content.append(rest[kept:])
    said = "".join(content)
    return said.strip() if calls or thoughts else said, thoughts, calls


def whole_reply(message: Message, *, opening: bool = False) -> str:
    """Return an assistant message as the policy sampled it, with reasoning and tool calls, without special tokens. With `opening`, it
    follows the thinking tag that ended the prompt. If only the parts of a message are known, as from an agent's API, the text is
    composed of them."""
    if (text := message.get("text")) is not None:
        return str(message.get("opening", "") if opening else "") + str(text)
    reasoning, calls = message.get("reasoning_content"), message.get("tool_calls") or ()
    parts = [f"<think>\n{reasoning}\n</think>"] if reasoning else []
    parts += [str(message["content"])] if message.get("content") else []
    parts += [f"<tool_call>\n{json.dumps(_call_of(one), ensure_ascii=False)}\n</tool_call>" for one in calls]
    return "\n".join(parts)


def searched(message: Message, pattern: str) -> str:
    """Return the text of a reply in which to search a user's regular expression: with tool calls but without reasoning, so that a
    reply that is cut off while thinking does not count as an answer. If the pattern names a thinking tag, in any case and even
    as one of several alternatives, return the whole reply, after the tag that ended the prompt."""
    if "reasoning_content" not in message or _NAMES_THINKING.search(pattern):
        return whole_reply(message, opening=True)
    if (text := message.get("text")) is not None:
        return _parts(str(text), message.get("opening"), keep_calls=True)[0]
    return whole_reply({name: value for name, value in message.items() if name != "reasoning_content"})


def _call_of(call: Mapping[str, Any]) -> Mapping[str, Any]:
    function = call.get("function", call)
    return {"name": function.get("name"), "arguments": function.get("arguments", {})}


def _function_of(call: str) -> dict[str, Any] | None:
    """Return name and arguments, or None if the JSON lacks them or the name is not one that APIs accept in a history. Some models
    write the arguments as JSON in a string."""
    try:
        said = json.loads(call)
        name, arguments = said["name"], said.get("arguments", {})
        arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
    except (ValueError, KeyError, RecursionError):
        return None
    if not isinstance(name, str) or not 0 < len(name) <= NAME_CHARACTERS or not isinstance(arguments, dict):
        return None
    if not is_shallow(arguments):
        return None
    return {"name": name, "arguments": arguments}


def is_shallow(value: Any) -> bool:
    """Return True if values are nested no deeper than DEEPEST."""
    level = [value]
    for _ in range(DEEPEST):
        level = [
            inner
            for one in level
            if isinstance(one, dict | list)
            for inner in (one.values() if isinstance(one, dict) else one)
            if isinstance(inner, dict | list)
        ]
        if not level:
            return True
    return False


@dataclass(frozen=True)
class ReplyReader:
    """Texts of special tokens by id: `special` ones are never part of the text; `ends` are not if they end it (an ordinary token may
    be an end: a newline). `decode`: ids to text, special tokens included."""

    special: Mapping[int, str]
    ends: Mapping[int, str]
    decode: Callable[[list[int]], str]

    def text(self, ids: Sequence[int], prompt: Sequence[int] = ()) -> str:
        """Return the reply's text. For a tokenizer with channels, the analysis becomes a `<think>` block and a call a `<tool_call>`.
        `prompt`: the last ids before the reply, which may have opened a channel."""
        size = len(ids)
        while size and (ids[size - 1] in self.ends or self._dropped(ids[size - 1])):
            size -= 1
        header = self._open_header(prompt)
        if any(self.special.get(one) == "<|message|>" for one in (*header, *ids)):
            return self._of_channels([*header, *ids[:size]])
        return self.decode([one for one in ids[:size] if not self._dropped(one)])

    def end(self, ids: Sequence[int]) -> str:
        """Return the text of the token that ends these ids, if it is not part of the text."""
        return {**self.ends, **self.special}.get(ids[-1], "") if len(ids) else ""

    def _dropped(self, one: int) -> bool:
        return one in self.special and self.special[one] not in READ

    def _open_header(self, prompt: Sequence[int]) -> list[int]:
        """Return the header of a message that a prompt begins with `<|start|>` and does not finish, without its known part."""
        texts = [self.special.get(one) for one in prompt]
        begins = [at for at, text in enumerate(texts) if text == "<|start|>"]
        if not begins or any(text in ("<|end|>", "<|call|>", "<|return|>") for text in texts[begins[-1] :]):
            return []
        at = begins[-1]
        end = texts.index("<|message|>", at) + 1 if "<|message|>" in texts[at:] else len(texts)
        return list(prompt[at:end])

    def _of_channels(self, ids: Sequence[int]) -> str:
        """Parse `<|channel|>NAME to=RECIPIENT<|message|>TEXT<|end|>` sequences ("OpenAI harmony response format")."""
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

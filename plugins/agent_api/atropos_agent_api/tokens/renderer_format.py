"""The formats of some twenty model families, from the package `renderers`."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from atropos_agent_api.tokens.formats import ChatFormat, Tools, text_of
from atropos_core.errors import ConfigError, DataError
from atropos_core.guards.worker_threads import apart_if_long
from atropos_core.rollouts.dropped_messages import DroppedMessages
from atropos_core.rollouts.replies import NAME_CHARACTERS, is_shallow
from atropos_core.rollouts.tokenizer import ChatTokenizer
from atropos_core.types import Message, Tokens

if TYPE_CHECKING:
    from renderers import ParsedResponse, Renderer

# Errors of a renderer for messages or ids that it cannot use.
FAULTS = (ValueError, TypeError, LookupError, AttributeError, AssertionError, RuntimeError)
FETCHES = frozenset({"gpt-oss"})  # its package loads its own vocabulary from the network


class RendererFormat(ChatFormat):
    """One renderer with the model's tokenizer. Raises ConfigError if the tokenizer lacks the family's special tokens."""

    def __init__(self, name: str, tokenizer: ChatTokenizer, **settings: Any) -> None:
        self.name = f"renderer {name}"
        self.unparsed = 0  # replies that the renderer could not read; their text became the content
        self._tokenizer = tokenizer
        self._renderer = _renderer(name, tokenizer, settings)
        self._messages = DroppedMessages(f"the format {self.name!r} of {tokenizer.directory.name}")
        self._ends = np.array(self._renderer.get_stop_token_ids(), np.int32)

    async def render(self, messages: Sequence[Message], tools: Tools) -> Tokens:
        return await apart_if_long((messages, tools), self.rendered, messages, tools)

    def rendered(self, messages: Sequence[Message], tools: Tools) -> Tokens:
        """As `render`."""
        marked, schemas = self._tokenizer.marked(messages), self._tokenizer.marked(tools)
        ids = self._ids(marked, schemas)
        self._messages.check(marked, schemas, ids, self._ids, ("whole",))
        return np.asarray(ids, np.int32)

    def _ids(self, marked: Sequence[Message], schemas: Tools) -> list[int]:
        try:
            return list(
                self._renderer.render_ids(_dicts(marked), tools=_dicts(schemas) or None, add_generation_prompt=True)
            )
        except FAULTS as error:
            raise DataError(f"the format {self.name!r} cannot render these messages: {error}") from error

    async def extend(self, prompt: Tokens, sampled: Tokens, messages: Sequence[Message], tools: Tools) -> Tokens | None:
        return await apart_if_long((messages, tools), self._extended, prompt, sampled, messages, tools)

    def _extended(self, prompt: Tokens, sampled: Tokens, messages: Sequence[Message], tools: Tools) -> Tokens | None:
        before, after = self._since_last_turn(prompt), sampled.tolist()
        try:
            bridged = self._renderer.bridge_to_next_turn(
                before, after, self._tokenizer.marked(messages), tools=self._tokenizer.marked(tools) or None
            )
        except FAULTS:
            return None  # everything is then rendered, which reports what is wrong with these messages
        if bridged is None or bridged.token_ids[: len(before) + len(after)] != before + after:
            return None
        return np.asarray(bridged.token_ids[len(before) + len(after) :], np.int32)

    async def parse(self, prompt: Tokens, sampled: Tokens, tools: Tools) -> Message:
        try:
            parsed = self._renderer.parse_response(
                sampled.tolist(), tools=_dicts(tools) or None, prompt_ids=self._since_last_turn(prompt)
            )
        except FAULTS:
            self.unparsed += 1
            return self._tokenizer.parse(sampled, prompt)
        message, text = _message(parsed), self._tokenizer.decode(sampled)
        if message["content"] != text:
            message |= {"text": text, "opening": self._tokenizer.opening(prompt)}
        return message

    def _since_last_turn(self, prompt: Tokens) -> list[int]:
        """The only part of a prompt that a renderer reads: how the reply's turn begins. The rest would be copied at each turn."""
        ends = np.flatnonzero(np.isin(prompt, self._ends))
        ids: list[int] = prompt[ends[-1] if len(ends) else 0 :].tolist()
        return ids

    async def text(self, ids: Tokens) -> str:
        return await text_of(self._tokenizer, ids)

    async def framed_text(self, ids: Tokens) -> str:
        return self._tokenizer.decode(ids, keep_special=True)

    async def encode(self, text: str) -> Tokens:
        return await apart_if_long(text, self._tokenizer.encode, text)

    async def completing_ids(self, texts: Sequence[str]) -> Sequence[int]:
        return await asyncio.to_thread(self._tokenizer.completing_ids, texts)


def renderer_names() -> list[str]:
    """The names of all renderers."""
    from renderers import base

    base._populate_registry()
    return [name for name in base.RENDERER_REGISTRY if name != "default"]


def _renderer(name: str, tokenizer: ChatTokenizer, settings: dict[str, Any]) -> Renderer:
    from renderers import config_from_name, create_renderer

    if name not in renderer_names():
        raise ConfigError(
            f"unknown format {name!r}.", remedy=f"Choose one of: auto, template, {', '.join(renderer_names())}."
        )
    try:
        config = type(config_from_name(name))(thinking_retention="all", **settings)
        return create_renderer(_Tokenizer(tokenizer), config)
    except FAULTS as error:
        raise ConfigError(
            f"the format {name!r} does not fit the tokenizer of {tokenizer.directory.name}: {error}",
            remedy='Use "template", the model\'s own chat template.',
        ) from error


class _Tokenizer:
    """Our tokenizer with the interface that renderers expect."""

    def __init__(self, tokenizer: ChatTokenizer) -> None:
        self.name_or_path = tokenizer.directory.name
        self.chat_template = tokenizer.template or ""
        self.unk_token_id: int | None = None
        self._tokenizer = tokenizer
        self._known: dict[str, int | None] = {}
        self.eos_token_id = self.convert_tokens_to_ids(tokenizer.eos) if tokenizer.eos else None

    def encode(self, text: str, *given: Any, **options: Any) -> list[int]:
        ids: list[int] = self._tokenizer.encode_marked(text).tolist()
        return ids

    def decode(self, ids: Any, *given: Any, skip_special_tokens: bool = False, **options: Any) -> str:
        return self._tokenizer.decode(np.asarray(ids, np.int32).reshape(-1), keep_special=not skip_special_tokens)

    def convert_tokens_to_ids(self, tokens: Any) -> Any:
        """The id of a special token; None for any other token."""
        if not isinstance(tokens, str):
            return [self.convert_tokens_to_ids(token) for token in tokens]
        if tokens not in self._known:
            ids = self._tokenizer.encode(tokens)
            self._known[tokens] = int(ids[0]) if len(ids) == 1 else None
        return self._known[tokens]


def _message(parsed: ParsedResponse) -> dict[str, Any]:
    """The message. A call that could not be read stays in the content, as sampled."""
    from renderers import ToolCallParseStatus as Status

    read = (Status.OK, Status.UNKNOWN_TOOL)
    made = [
        call
        for call in parsed.tool_calls
        if call.status in read and 0 < len(call.name or "") <= NAME_CHARACTERS and is_shallow(call.arguments)
    ]
    broken = [call.raw for call in parsed.tool_calls if call not in made and call.raw not in parsed.content]
    message: dict[str, Any] = {"role": "assistant", "content": "\n".join(filter(None, [parsed.content, *broken]))}
    if parsed.reasoning_content:
        message["reasoning_content"] = parsed.reasoning_content
    if made:
        message["tool_calls"] = [
            {
                **({"id": call.id} if call.id else {}),
                "type": "function",
                "function": {"name": call.name, "arguments": {} if call.arguments is None else call.arguments},
            }
            for call in made
        ]
    return message


def _dicts(values: Sequence[Any]) -> list[Any]:
    return [dict(value) for value in values]

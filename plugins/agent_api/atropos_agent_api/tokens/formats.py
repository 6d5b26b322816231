"""Formats turn messages into ids, and sampled ids into a message: the interface, and the model's own chat template.

A format never encodes again what was sampled: `extend` returns only the ids that follow.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from atropos_core.conversation import Policy
from atropos_core.errors import DataError
from atropos_core.guards.worker_threads import LONG, all_apart, apart, apart_if_long
from atropos_core.rollouts.tokenizer import ChatTokenizer
from atropos_core.types import Message, Tokens

Tools = Sequence[Mapping[str, Any]]


class ChatFormat(Protocol):
    """Messages have text as content, and arguments as objects if they are JSON (`canonical.plain_message`)."""

    name: str  # "template", or that of a renderer: "renderer qwen3"

    async def render(self, messages: Sequence[Message], tools: Tools) -> Tokens:
        """Ids of a conversation, ready for the assistant's reply. Raises DataError if it cannot be rendered."""

    async def extend(self, prompt: Tokens, sampled: Tokens, messages: Sequence[Message], tools: Tools) -> Tokens | None:
        """The ids that follow `prompt` and `sampled` when `messages` come next, ready for a reply. None if this format cannot
        extend them."""

    async def parse(self, prompt: Tokens, sampled: Tokens, tools: Tools) -> Message:
        """The assistant's message that was sampled after `prompt`, for any ids."""

    async def text(self, ids: Tokens) -> str:
        """The text of these ids, without the tokens that frame a turn."""

    async def framed_text(self, ids: Tokens) -> str:
        """The text with the tokens that frame a turn, which `encode` turns back into the same ids. Raises DataError without a
        tokenizer."""

    async def encode(self, text: str) -> Tokens:
        """The ids of a prompt that is not a conversation. Raises DataError without a tokenizer."""

    async def completing_ids(self, texts: Sequence[str]) -> Sequence[int]:
        """Tokens that may be the last of one of these texts; none without a tokenizer."""


async def text_of(tokenizer: ChatTokenizer, ids: Tokens) -> str:
    """As `ChatFormat.text`. Many ids are decoded outside the event loop."""
    return await apart(tokenizer.decode, ids) if len(ids) > LONG else tokenizer.decode(ids)


class TemplateFormat(ChatFormat):
    """The model's own chat template, through the policy. A policy need not have a tokenizer. Without one, text prompts are
    refused, and the text of a reply is its content."""

    name = "template"

    def __init__(self, policy: Policy, tokenizer: ChatTokenizer | None) -> None:
        self._policy = policy
        self._tokenizer = tokenizer

    async def render(self, messages: Sequence[Message], tools: Tools) -> Tokens:
        with all_apart():
            return await self._policy.render(messages, tools=tools or None)

    async def extend(self, prompt: Tokens, sampled: Tokens, messages: Sequence[Message], tools: Tools) -> Tokens | None:
        try:
            with all_apart():
                return await self._policy.render(messages, tools=tools or None, after=np.concatenate([prompt, sampled]))
        except DataError:
            return None

    async def parse(self, prompt: Tokens, sampled: Tokens, tools: Tools) -> Message:
        return await self._policy.parse(sampled, prompt=prompt)

    async def text(self, ids: Tokens) -> str:
        if self._tokenizer is None:
            return str((await self._policy.parse(ids)).get("content") or "")
        return await text_of(self._tokenizer, ids)

    async def framed_text(self, ids: Tokens) -> str:
        if self._tokenizer is None:
            raise DataError("this policy has no tokenizer, so what its ids say is not known.")
        return self._tokenizer.decode(ids, keep_special=True)

    async def encode(self, text: str) -> Tokens:
        if self._tokenizer is None:
            raise DataError("this policy has no tokenizer, so a prompt that is not a conversation cannot be encoded.")
        return await apart_if_long(text, self._tokenizer.encode, text)

    async def completing_ids(self, texts: Sequence[str]) -> Sequence[int]:
        if self._tokenizer is None:
            return ()
        return await asyncio.to_thread(self._tokenizer.completing_ids, texts)

"""Replies in the form of OpenAI's client, as far as environment files read them."""

from __future__ import annotations

import json
import time
import uuid
from typing import Any

from pydantic import BaseModel, ConfigDict

from atropos_core.rollouts.replies import message_of
from atropos_env_atroposlib.standins.link import Reply


class _Part(BaseModel):
    model_config = ConfigDict(extra="allow")

    def __getitem__(self, name: str) -> Any:
        return getattr(self, name)

    def get(self, name: str, default: Any = None) -> Any:
        return getattr(self, name, default)


class Function(_Part):
    name: str
    arguments: str


class ToolCall(_Part):
    id: str
    type: str = "function"
    function: Function


class ChatMessage(_Part):
    role: str = "assistant"
    content: str | None = None
    tool_calls: list[ToolCall] | None = None
    reasoning_content: str | None = None
    refusal: str | None = None


class Choice(_Part):
    index: int
    finish_reason: str
    message: ChatMessage
    logprobs: Any = None


class TextChoice(_Part):
    index: int
    finish_reason: str
    text: str
    logprobs: Any = None


class Usage(_Part):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class Answer(_Part):
    id: str
    object: str
    created: int
    model: str
    choices: list[Any]
    usage: Usage


def chat_answer(replies: list[Reply], model: str, *, tools: bool) -> Answer:
    """With `tools`, calls are read out of the text."""
    choices = [
        Choice(index=at, finish_reason=one.finish, message=_message(one, tools=tools)) for at, one in enumerate(replies)
    ]
    for choice in choices:
        if choice.message.tool_calls:
            choice.finish_reason = "tool_calls"
    return _answer("chat.completion", choices, replies, model)


def text_answer(replies: list[Reply], model: str) -> Answer:
    choices = [TextChoice(index=at, finish_reason=one.finish, text=one.text) for at, one in enumerate(replies)]
    return _answer("text_completion", choices, replies, model)


def _answer(kind: str, choices: list[Any], replies: list[Reply], model: str) -> Answer:
    prompt, sampled = len(replies[0].prompt) if replies else 0, sum(len(one.tokens) for one in replies)
    usage = Usage(prompt_tokens=prompt, completion_tokens=sampled, total_tokens=prompt + sampled)
    return Answer(id=uuid.uuid4().hex, object=kind, created=int(time.time()), model=model, choices=choices, usage=usage)


def _message(reply: Reply, *, tools: bool) -> ChatMessage:
    if not tools:
        return ChatMessage(content=reply.text)
    said = message_of(reply.text)
    calls = [
        ToolCall(
            id=f"call_{uuid.uuid4().hex[:8]}",
            function=Function(name=one["function"]["name"], arguments=json.dumps(one["function"]["arguments"])),
        )
        for one in said.get("tool_calls", ())
    ]
    return ChatMessage(content=said["content"] if calls else reply.text, tool_calls=calls or None)

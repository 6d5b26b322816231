"""The observation for the trainer: only new text, or all messages."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from atropos_adapter_roll import texts
from atropos_adapter_roll.config import EnvOptions
from atropos_core.errors import DataError
from atropos_core.types import Message, Tokens

Observation = str | list[dict[str, Any]]


@dataclass(frozen=True)
class Shown:
    """One observation. `tool`: it is the answer of a tool, and nothing else."""

    observation: Observation
    tool: bool = False
    tools: tuple[Mapping[str, Any], ...] = ()


def show(options: EnvOptions, prompt: Tokens, history: Tokens | None) -> Shown:
    """`history` holds earlier observations and replies. Raises DataError if a delta cannot express the prompt."""
    talk = texts.read(prompt)
    if options.observation == "messages":
        return Shown([dict(message) for message in talk.messages], tools=tuple(talk.tools))
    if history is None:
        return Shown(_first(options, talk), tools=tuple(talk.tools))
    if len(prompt) <= len(history) or not np.array_equal(prompt[: len(history)], history):
        raise DataError(
            "the environment rewrote its history, or requested two replies at once: what it shows now does not follow what "
            "it showed before, but delta observations make one token history of an episode.",
            remedy='Use env_manager_cls: atropos_adapter_roll.managers.AgentNativeStepEnvManager with observation: "messages".',
        )
    new = texts.read(prompt[len(history) :]).messages
    _refuse_replies(new)
    return Shown(_text(new), tool=all(message["role"] == "tool" for message in new))


def _first(options: EnvOptions, talk: texts.Talk) -> str:
    """The opening as one text, which includes the environment's system message."""
    messages = talk.messages
    _refuse_replies(messages)
    if options.system is not None and messages and messages[0]["role"] == "system":
        if str(messages[0]["content"]).strip() != options.system.strip():
            raise DataError(
                "the environment's system message differs from env_config.system, which agent_system_template shows: "
                f"{str(messages[0]['content'])[:80]!r}.",
                remedy="Write the same text in both, or leave env_config.system out: it is then part of the observation.",
            )
        messages = messages[1:]
    if not talk.tools:
        return _text(messages)
    described = "\n".join(json.dumps(tool.get("function", tool)) for tool in talk.tools)
    how = 'To call a tool, reply <tool_call>{"name": NAME, "arguments": {...}}</tool_call>. There is:'
    return f"{how}\n{described}\n\n{_text(messages)}"


def _text(messages: Sequence[Message]) -> str:
    return "\n\n".join(_content(message) for message in messages)


def _content(message: Message) -> str:
    content = message.get("content")
    if isinstance(content, str):
        return content
    if isinstance(content, list) and all(isinstance(part, dict) and part.get("type") == "text" for part in content):
        return "\n".join(str(part["text"]) for part in content)
    raise DataError(
        f"a delta observation is text, and the content of a {message['role']} message is {str(content)[:80]!r}."
    )


def _refuse_replies(messages: Sequence[Message]) -> None:
    if any(message["role"] == "assistant" for message in messages):
        raise DataError(
            "the environment writes a reply on the model's behalf, which a delta observation cannot show.",
            remedy='Use env_manager_cls: atropos_adapter_roll.managers.AgentNativeStepEnvManager with observation: "messages".',
        )

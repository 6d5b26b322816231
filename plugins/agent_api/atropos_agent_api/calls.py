"""One request of an agent and its answer, whichever API it used: the types between the dialects and a session.

A dialect (`dialects/`) turns a request's JSON into a `Call` and an `Answer` into JSON or server-sent events; a session
(`session.py`) turns a `Call` into an `Answer` with the policy. Neither knows the other.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import orjson

from atropos_core.rollouts.replies import DEEPEST, is_shallow
from atropos_core.types import Floats, Message, Tokens

MOST_ARGUMENTS = 100_000  # objects, lists and separators in the text of arguments that is read as JSON

Dialect = Literal["chat", "completions", "responses", "messages"]
Finish = Literal["stop", "length", "tool_calls"]


@dataclass(frozen=True)
class Call:
    """A request to sample. Messages and tools are in OpenAI's chat form, whatever the dialect: content is text, `tool_calls`
    hold their arguments as objects if they are JSON, reasoning is `reasoning_content`.

    `sampling` has "temperature", "top_p", "top_k", "seed" and the client's other wishes for sampling ("reasoning_effort").
    `hints` has "retry", "session", "agent" and "kind"."""

    dialect: Dialect
    model: str
    messages: tuple[Message, ...] = ()
    prompt: str | Tokens | None = None  # of /v1/completions, which has no messages
    tools: tuple[Mapping[str, Any], ...] = ()  # {"type": "function", "function": {"name", "description", "parameters"}}
    tool_choice: str = "auto"  # or "none", "required", or "tool:NAME"
    parallel_tool_calls: bool = True
    n: int = 1
    stop: tuple[str, ...] = ()
    max_tokens: int | None = None
    sampling: Mapping[str, float | str] = field(default_factory=dict)  # only the given ones
    left_out: tuple[str, ...] = ()  # parts of the request that the model does not see: "tools: web_search"
    logprobs: bool = False
    hints: Mapping[str, str] = field(default_factory=dict)  # from headers, about the call's origin


@dataclass(frozen=True)
class Choice:
    """One continuation, as the agent sees it and as it was sampled."""

    message: Message  # assistant: content, reasoning_content, tool_calls (each with an id)
    finish: Finish
    tokens: Tokens  # [T] of what is shown
    logprobs: Floats  # [T]
    texts: tuple[str, ...] = ()  # [T] the text of each token, if the call asked for logprobs
    stop: str = ""  # the stop text that ended it


@dataclass(frozen=True)
class Answer:
    """The answer of a session. `id` is that of the turn in the session's record."""

    id: str
    model: str
    choices: tuple[Choice, ...]
    prompt_tokens: int
    cached_tokens: int = 0  # tokens of the prompt that an earlier turn of the session already has
    created: int = 0  # seconds since the epoch

    @property
    def completion_tokens(self) -> int:
        return sum(len(choice.tokens) for choice in self.choices)


SESSION_ENDED = "Start another episode: it gets a new session and a new key."
CALLS_USED = "End the episode here, or have the run allow more: limits.calls."


class CallRefused(Exception):
    """A request that is answered with an error. `status` is the HTTP status. `field` names the wrong part of the request's JSON,
    if any. `code` is for programs ("unsupported_parameter", "session_ended", "context_length_exceeded")."""

    def __init__(self, message: str, *, status: int = 400, field: str = "", code: str = "invalid_request") -> None:
        super().__init__(message)
        self.status = status
        self.field = field
        self.code = code


def read_arguments(text: str) -> Any:
    """The arguments of a call, parsed from JSON. None if the text is not JSON, or has more or deeper values than every reader
    accepts: it then stays text."""
    if "\\u" not in text:
        marks = text.count("{") + text.count("[")
        if marks <= DEEPEST and text.count(",") <= MOST_ARGUMENTS:
            try:
                return json.loads(text)
            except (ValueError, RecursionError):
                return None
    if text.count("{") + text.count("[") + text.count(",") > MOST_ARGUMENTS:
        return None
    try:
        value = orjson.loads(text)  # refuses halves of characters, and what is very deep
    except orjson.JSONDecodeError:
        return None
    return json.loads(text) if is_shallow(value) else None  # numbers may be as large as they like

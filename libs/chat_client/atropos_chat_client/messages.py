"""Messages in the form of OpenAI's API."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from atropos_core.types import Message


def openai_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Convert messages for OpenAI's API: arguments of calls as text, each call with an id that its answer names, and no reasoning,
    which the API does not accept."""
    made: list[dict[str, Any]] = []
    unanswered: list[str] = []
    for at, message in enumerate(messages):
        one = {name: value for name, value in message.items() if name != "reasoning_content"}
        if calls := message.get("tool_calls"):
            one["tool_calls"] = [
                {
                    "id": f"call_{at}_{number}", "type": "function", **call,
                    "function": {**call["function"], "arguments": arguments_text(call["function"].get("arguments"))},
                }
                for number, call in enumerate(calls)
            ]  # fmt: skip
            unanswered = [call["id"] for call in one["tool_calls"]]
        elif message.get("role") == "tool" and unanswered:
            one.setdefault("tool_call_id", unanswered[0])
            unanswered = [call for call in unanswered if call != one["tool_call_id"]]
        made.append(one)
    return made


def arguments_text(arguments: Any) -> str:
    """Return the arguments of a tool call as text."""
    return arguments if isinstance(arguments, str) else json.dumps({} if arguments is None else arguments)

"""Messages of chat's form, as a client sends them and as it is shown a reply."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from atropos_agent_api.calls import CallRefused
from atropos_agent_api.dialects.fields import Fields
from atropos_agent_api.dialects.values import (
    a_list,
    a_name,
    a_text,
    an_object,
    arguments_of,
    arguments_text,
    text_of,
    writable,
    wrong,
)
from atropos_core.types import Message

OF_MESSAGES = {
    "system": Fields(read=dict.fromkeys(("role", "content", "name"), "")),
    "user": Fields(read=dict.fromkeys(("role", "content", "name"), "")),
    "tool": Fields(read=dict.fromkeys(("role", "content", "tool_call_id", "name"), "")),
    "assistant": Fields(
        read=dict.fromkeys(("role", "content", "name", "tool_calls", "reasoning_content", "reasoning"), ""),
        no_effect={
            "refusal": "null, or shown to people",
            "annotations": "of hosted tools",
            "provider_specific_fields": "litellm's, of what a reply had besides",
        },
        only={"audio": (None,), "function_call": (None,)},
    ),
}  # `cache_control` and the like of other servers' clients are refused by name
ROLES = {"developer": "system"}


def with_one_system(messages: Sequence[Message]) -> tuple[Message, ...]:
    """With the system's messages that open a conversation in one: clients send several, and many templates take one."""
    opening = 0
    while opening < len(messages) and messages[opening]["role"] == "system":
        opening += 1
    if opening < 2:
        return tuple(messages)
    joined = "\n\n".join(message["content"] for message in messages[:opening])
    return ({"role": "system", "content": joined}, *messages[opening:])


def a_message(value: Any, path: str) -> Message:
    given = an_object(value, path)
    role = given.get("role")
    role = ROLES.get(role, role) if isinstance(role, str) else None
    if role not in OF_MESSAGES:
        raise wrong(f"{path}.role", "one of developer, system, user, assistant and tool")
    OF_MESSAGES[role].check(given, path)
    kinds = ("text", "refusal") if role == "assistant" else ("text",)
    if given.get("content") is None and role != "assistant":
        raise wrong(f"{path}.content", "text or a list of parts")
    content = text_of(given.get("content"), f"{path}.content", kinds, "" if role == "assistant" else "\n")
    message: dict[str, Any] = {"role": role, "content": content}
    if given.get("name") is not None:
        message["name"] = a_name(given["name"], f"{path}.name")
    if role == "tool":
        message["tool_call_id"] = a_text(given.get("tool_call_id"), f"{path}.tool_call_id")
    if role == "assistant":
        for name in ("reasoning_content", "reasoning"):
            if given.get(name) is not None:
                message["reasoning_content"] = a_text(given[name], f"{path}.{name}")
        if calls := a_list(given.get("tool_calls") or [], f"{path}.tool_calls"):
            message["tool_calls"] = [_a_call(one, f"{path}.tool_calls[{at}]") for at, one in enumerate(calls)]
    return message


def _a_call(value: Any, path: str) -> dict[str, Any]:
    given = an_object(value, path)
    if given.get("type", "function") != "function":
        raise CallRefused(
            f"{path}.type can only be 'function' here. Send the call of a function.", field=f"{path}.type"
        )
    function = an_object(given.get("function"), f"{path}.function")
    return {
        "id": a_text(given.get("id"), f"{path}.id"),
        "type": "function",
        "function": {
            "name": a_name(function.get("name"), f"{path}.function.name"),
            "arguments": arguments_of(function.get("arguments"), f"{path}.function.arguments"),
        },
    }


def shown_message(message: Message) -> dict[str, Any]:
    calls = message.get("tool_calls") or ()
    content = writable(message.get("content") or "")
    shown_: dict[str, Any] = {"role": "assistant", "content": content or (None if calls else ""), "refusal": None}
    if reasoning := message.get("reasoning_content"):
        shown_["reasoning_content"] = writable(reasoning)
    if calls:
        shown_["tool_calls"] = [
            {
                "id": call["id"],
                "type": "function",
                "function": {
                    "name": writable(call["function"]["name"]),
                    "arguments": arguments_text(call["function"]["arguments"]),
                },
            }
            for call in calls
        ]
    return shown_

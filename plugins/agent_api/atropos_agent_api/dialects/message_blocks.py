"""Content blocks of Anthropic's messages: convert a client's to chat messages, and a reply to blocks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from atropos_agent_api.calls import CallRefused
from atropos_agent_api.dialects.fields import Fields
from atropos_agent_api.dialects.values import (
    a_list,
    a_name,
    a_text,
    an_object,
    arguments_of,
    is_writable,
    text_of,
    writable,
    wrong,
)
from atropos_core.rollouts.replies import is_shallow
from atropos_core.types import Message

CACHE = {"cache_control": "the session knows its own history"}
TURN = Fields(read={"role": "", "content": ""})
BLOCKS = {
    "text": Fields(read={"type": "", "text": ""}, no_effect=CACHE, only={"citations": (None, [])}),
    "thinking": Fields(read={"type": "", "thinking": ""}, no_effect={**CACHE, "signature": "who wrote it is known"}),
    "tool_use": Fields(
        read=dict.fromkeys(("type", "id", "name", "input"), ""),
        no_effect={**CACHE, "caller": "there is one"},
        only={"toolset_name": (None,)},
    ),
    "tool_result": Fields(
        read=dict.fromkeys(("type", "tool_use_id", "content", "is_error"), ""), no_effect=CACHE
    ),
}  # fmt: skip
OF_ROLES = {"user": ("text", "tool_result"), "assistant": ("text", "thinking", "tool_use"), "system": ("text",)}


def a_turn(value: Any, path: str) -> list[Message]:
    """One message of a client. Results of tools come first, each as a separate message."""
    given = an_object(value, path)
    TURN.check(given, path)
    role = given.get("role")
    if not isinstance(role, str) or role not in OF_ROLES:
        raise wrong(f"{path}.role", "one of user, assistant and system")
    content = given.get("content")
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    blocks = [
        _block(one, f"{path}.content[{at}]", OF_ROLES[role])
        for at, one in enumerate(a_list(content, f"{path}.content"))
    ]
    if role == "assistant":
        return [_of_assistant(blocks, path)]
    messages = [_result(block, f"{path}.content") for block in blocks if block["type"] == "tool_result"]
    texts = [a_text(block.get("text"), f"{path}.content.text") for block in blocks if block["type"] == "text"]
    return [*messages, {"role": role, "content": "\n".join(texts)}] if texts or not messages else messages


def blocks_of(message: Message, answer_id: str) -> list[dict[str, Any]]:
    """A reply as blocks."""
    calls = message.get("tool_calls") or ()
    blocks: list[dict[str, Any]] = []
    if reasoning := message.get("reasoning_content"):
        blocks.append({"type": "thinking", "thinking": writable(reasoning), "signature": answer_id})
    text = writable(message.get("content") or "")
    if text.strip() or not calls:
        blocks.append({"type": "text", "text": text})
    for call in calls:
        function = call["function"]
        named = {"type": "tool_use", "id": call["id"], "name": writable(function["name"])}
        blocks.append({**named, "input": _input(function["arguments"])})
    return blocks


def _block(value: Any, path: str, kinds: tuple[str, ...]) -> Mapping[str, Any]:
    block = an_object(value, path)
    kind = block.get("type")
    if kind not in kinds:
        raise CallRefused(
            f"{path} has the type {str(kind)[:40]!r}, but only {' and '.join(kinds)} are accepted here: "
            "the policy reads text. Send it as text.",
            field=path,
            code="unsupported_content",
        )
    BLOCKS[kind].check(block, path)
    return block


def _of_assistant(blocks: list[Mapping[str, Any]], path: str) -> Message:
    where = f"{path}.content"
    said = [a_text(block.get("text"), f"{where}.text") for block in blocks if block["type"] == "text"]
    thought = [a_text(block.get("thinking"), f"{where}.thinking") for block in blocks if block["type"] == "thinking"]
    message: dict[str, Any] = {"role": "assistant", "content": "".join(said)}
    if reasoning := "".join(thought):
        message["reasoning_content"] = reasoning
    calls = [
        {
            "id": a_text(block.get("id"), f"{where}.id"),
            "type": "function",
            "function": {
                "name": a_name(block.get("name"), f"{where}.name"),
                "arguments": arguments_of(an_object(block.get("input"), f"{where}.input"), f"{where}.input"),
            },
        }
        for block in blocks
        if block["type"] == "tool_use"
    ]
    return {**message, "tool_calls": calls} if calls else message


def _result(block: Mapping[str, Any], path: str) -> Message:
    message: dict[str, Any] = {
        "role": "tool",
        "tool_call_id": a_text(block.get("tool_use_id"), f"{path}.tool_use_id"),
        "content": text_of(block.get("content"), f"{path}.content", ("text",), "\n"),
    }
    if block.get("is_error") is True:
        message["is_error"] = True  # for a template that shows it
    return message


def _input(arguments: Any) -> dict[str, Any]:
    """The arguments as an object. If the policy wrote something else, it is a text inside one."""
    if isinstance(arguments, dict) and is_shallow(arguments) and is_writable(arguments):
        return arguments
    return {"arguments": writable(arguments if isinstance(arguments, str) else str(arguments))}

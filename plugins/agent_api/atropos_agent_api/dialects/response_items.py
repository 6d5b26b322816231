"""Items of OpenAI's responses: convert a client's input to chat messages, and a reply to output items.

The model sees the tools of a namespace by flat names: the function `find` of `crm` is `crm__find`. A call of it is shown to the client
as the function `find` of the namespace `crm` again.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from atropos_agent_api.calls import CallRefused, Choice
from atropos_agent_api.dialects.chat_messages import ROLES
from atropos_agent_api.dialects.fields import Fields, shown
from atropos_agent_api.dialects.tools import FUNCTION, function_tool, strictness
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

HOSTED = ("web_search", "file_search", "code_interpreter", "image_generation", "mcp", "tool_search")  # run by OpenAI
OF_ALL = {"status": "only in items that we return", "internal_chat_message_metadata_passthrough": "codex's own"}
ITEMS = {
    "message": Fields(
        read=dict.fromkeys(("type", "role", "content"), ""),
        no_effect={**OF_ALL, "id": "", "phase": "only for display"},
    ),
    "function_call": Fields(
        read=dict.fromkeys(("type", "call_id", "name", "namespace", "arguments"), ""),
        no_effect={**OF_ALL, "id": "", "caller": "there is one"},
        only={"async": (None, False)},
    ),
    "function_call_output": Fields(
        read=dict.fromkeys(("type", "call_id", "output"), ""),
        no_effect={**OF_ALL, "id": "", "caller": "there is one", "name": "of the call", "namespace": "of the call"},
    ),
    "reasoning": Fields(
        read=dict.fromkeys(("type", "content", "encrypted_content"), ""),
        no_effect={**OF_ALL, "id": "", "summary": "there is none"},
    ),
}
TEXTS = ("input_text", "output_text", "text", "refusal")


@dataclass
class Tools:
    """The tools that the model sees, and the names by which the client knows them."""

    seen: list[dict[str, Any]] = field(default_factory=list)
    names: set[str] = field(default_factory=set)
    left_out: list[str] = field(default_factory=list)
    namespaces: dict[str, tuple[str, str]] = field(default_factory=dict)  # by the flat name


def flat_name(namespace: str, name: str) -> str:
    return f"{namespace.removesuffix('__')}__{name}"


def tools_of(given: list[Any]) -> Tools:
    tools = Tools()
    for at, one in enumerate(given):
        path = f"tools[{at}]"
        tool = an_object(one, path)
        kind = tool.get("type")
        if kind == "function":
            _add(tools, "", tool, path)
        elif kind == "namespace":
            for inner, function in enumerate(a_list(tool.get("tools"), f"{path}.tools")):
                _add(tools, a_name(tool.get("name"), f"{path}.name"), function, f"{path}.tools[{inner}]")
        elif isinstance(kind, str) and kind.startswith(HOSTED):
            tools.left_out.append(f"tools: {kind[:40]}")
        else:
            raise _no_such_tool(path, kind)
    return tools


def messages_of(items: list[Any]) -> list[dict[str, Any]]:
    """Chat messages. Consecutive items of the assistant become one message."""
    messages: list[dict[str, Any]] = []
    for at, one in enumerate(items):
        path = f"input[{at}]"
        item = an_object(one, path)
        kind = item.get("type") or "message"
        if not isinstance(kind, str) or kind not in ITEMS:
            raise CallRefused(
                f"{path} has the type {shown(str(kind))}, but this API accepts {', '.join(ITEMS)}. Send one of these.",
                field=path,
                code="unsupported_content",
            )
        ITEMS[kind].check(item, path)
        if kind == "function_call_output":
            messages.append(
                {
                    "role": "tool",
                    "tool_call_id": a_text(item.get("call_id"), f"{path}.call_id"),
                    "content": text_of(item.get("output"), f"{path}.output", TEXTS, "\n"),
                }
            )
        elif kind == "message" and item.get("role") != "assistant":
            messages.append(_of_others(item, path))
        else:
            _add_to_assistant(messages, _of_assistant(kind, item, path))
    return messages


def output_of(
    choice: Choice, answer_id: str, namespaces: Mapping[str, tuple[str, str]], *, sealed: bool, logprobs: Any
) -> list[dict[str, Any]]:
    """A reply as items. If `sealed`, `encrypted_content` also holds the reasoning, from which it is read again."""
    message, items = choice.message, list[dict[str, Any]]()
    calls = message.get("tool_calls") or ()
    text = writable(message.get("content") or "")
    if reasoning := writable(message.get("reasoning_content") or ""):
        content = [{"type": "reasoning_text", "text": reasoning}]
        item = {"id": f"rs_{answer_id}", "type": "reasoning", "summary": [], "content": content}
        items.append({**item, "encrypted_content": _seal(reasoning)} if sealed else item)
    if text.strip() or not calls:
        part = {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}
        items.append(
            {"id": f"msg_{answer_id}", "type": "message", "role": "assistant", "status": "completed", "content": [part]}
        )
    for at, call in enumerate(calls):
        namespace, name = namespaces.get(call["function"]["name"], ("", call["function"]["name"]))
        item = {
            "id": f"fc_{answer_id}_{at}",
            "type": "function_call",
            "call_id": call["id"],
            "name": writable(name),
            "arguments": arguments_text(call["function"]["arguments"]),
            "status": "completed",
        }
        items.append({**item, "namespace": namespace} if namespace else item)
    if choice.finish == "length" and "status" in items[-1]:
        items[-1]["status"] = "incomplete"
    return items


def _add(tools: Tools, namespace: str, value: Any, path: str) -> None:
    given = an_object(value, path)
    if given.get("type") != "function":
        raise _no_such_tool(path, given.get("type"))
    plain = {key: one for key, one in given.items() if key not in ("allowed_callers", "defer_loading", "output_schema")}
    FUNCTION.check(plain, path)
    tool = function_tool(plain, path)
    if namespace:
        flat = flat_name(namespace, tool["function"]["name"])
        tools.namespaces[flat] = (namespace, tool["function"]["name"])
        tool["function"]["name"] = flat
    if tool["function"]["name"] in tools.names:
        raise CallRefused(f"{path} has the name of another tool. Rename one of the two.", field=path)
    tools.names.add(tool["function"]["name"])
    tools.seen.append(tool)
    if (strict := strictness([given])) and strict[0] not in tools.left_out:
        tools.left_out += strict


def _no_such_tool(path: str, kind: Any) -> CallRefused:
    return CallRefused(
        f"{path} has the type {shown(str(kind))}, but this API accepts functions and namespaces of them. Describe the tool as a function.",
        field=path,
        code="unsupported_tool",
    )


def _of_others(item: Mapping[str, Any], path: str) -> dict[str, Any]:
    role = item.get("role")
    role = ROLES.get(role, role) if isinstance(role, str) else role
    if role not in ("system", "user"):
        raise wrong(f"{path}.role", "one of developer, system, user and assistant")
    if item.get("content") is None:
        raise wrong(f"{path}.content", "text or a list of parts")
    return {"role": role, "content": text_of(item["content"], f"{path}.content", TEXTS, "\n")}


def _of_assistant(kind: str, item: Mapping[str, Any], path: str) -> dict[str, Any]:
    if kind == "message":
        return {"content": text_of(item.get("content"), f"{path}.content", TEXTS)}
    if kind == "reasoning":
        thought = text_of(item.get("content"), f"{path}.content", ("reasoning_text", "text"))
        return {"reasoning_content": thought or _unseal(item.get("encrypted_content"))}
    name, namespace = a_name(item.get("name"), f"{path}.name"), item.get("namespace")
    function = {
        "name": flat_name(a_name(namespace, f"{path}.namespace"), name) if namespace else name,
        "arguments": arguments_of(item.get("arguments"), f"{path}.arguments"),
    }
    call = {"id": a_text(item.get("call_id"), f"{path}.call_id"), "type": "function", "function": function}
    return {"tool_calls": [call]}


def _add_to_assistant(messages: list[dict[str, Any]], said: dict[str, Any]) -> None:
    """Add to the last message if it is the assistant's and one reply can have this part next; else append a message."""
    last: dict[str, Any] = messages[-1] if messages else {"role": ""}
    follows = {
        "reasoning_content": (),
        "content": ("reasoning_content",),
        "tool_calls": ("reasoning_content", "content", "tool_calls"),
    }
    [(name, value)] = said.items()
    if last["role"] == "assistant" and {key for key in last if key != "role" and last[key]} <= {*follows[name]}:
        if name == "tool_calls":
            last.setdefault(name, []).extend(value)
        else:
            last[name] = value
    else:
        messages.append({"role": "assistant", "content": "", **said})


def _seal(reasoning: str) -> str:
    """Text that the client keeps and sends back without reading it. It is not a secret."""
    return base64.b64encode(reasoning.encode()).decode()


def _unseal(value: Any) -> str:
    """The reasoning that `_seal` encoded; empty for another server's, which cannot be read."""
    if not isinstance(value, str):
        return ""
    try:
        return base64.b64decode(value, validate=True).decode()
    except (binascii.Error, ValueError):
        return ""

"""Anthropic's messages: `POST /v1/messages` and `POST /v1/messages/count_tokens`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from atropos_agent_api.calls import Answer, Call, CallRefused
from atropos_agent_api.dialects.chat_messages import with_one_system
from atropos_agent_api.dialects.dialect import event
from atropos_agent_api.dialects.fields import Fields, shown
from atropos_agent_api.dialects.message_blocks import CACHE, a_turn, blocks_of
from atropos_agent_api.dialects.tools import strictness
from atropos_agent_api.dialects.values import (
    MOST_TOKENS,
    a_flag,
    a_list,
    a_name,
    a_schema,
    a_text,
    an_integer,
    an_object,
    arguments_text,
    number,
    stops,
    text_of,
    word,
    wrong,
)

HOSTED = ("web_search_", "web_fetch_", "code_execution_", "tool_search_tool_")  # tools that Anthropic's servers run
STOPS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
ERRORS = {
    400: "invalid_request_error", 401: "authentication_error", 403: "permission_error", 404: "not_found_error",
    405: "invalid_request_error", 408: "timeout_error", 409: "conflict_error", 413: "request_too_large",
    429: "rate_limit_error", 503: "overloaded_error",
}  # fmt: skip


def _thinking(value: Any, name: str) -> str | None:
    kind = a_name(an_object(value if value is not None else {"type": "disabled"}, name).get("type"), f"{name}.type")
    return None if kind == "disabled" else kind


def _effort(value: Any, name: str) -> str | None:
    given = an_object(value if value is not None else {}, name)
    OUTPUT.check(given, name)
    return word(given.get("effort"), f"{name}.effort")


OUTPUT = Fields(read={"effort": "how much to think"}, only={"format": (None,)})
FIELDS = Fields(
    read={
        "model": "any name; the policy answers, and the answer has this name",
        "messages": "the conversation: text, tool_use, tool_result and thinking",
        "system": "text, or a list of texts",
        "max_tokens": "at most as many as the run samples",
        "tools": "with an input_schema; those that Anthropic's servers run are left out, and counted",
        "tool_choice": "auto, any, tool or none, if the model's format can begin a call; disable_parallel_tool_use",
        "stop_sequences": "texts at which a reply ends; tokens sampled past it are not shown and not trained",
        "stream": "server-sent events",
        "context_management": "left out, and counted: the history is the client's own to edit",
    },
    no_effect={
        "metadata": "who calls is known by the key",
        "service_tier": "there is one",
        "cache_control": "the session knows its own history",
        "inference_geo": "there is one place",
        "speed": "there is one",
        "user_profile_id": "who calls is known by the key",
        "workspace_id": "who calls is known by the key",
    },
    only={"container": (None,), "mcp_servers": (None, []), "diagnostics": (None,)},
    sampling={
        "temperature": number(0, 1),
        "top_p": number(0, 1),
        "top_k": number(0, 2**31),
        "thinking": _thinking,
        "output_config": _effort,
    },
)
TOOL = Fields(
    read=dict.fromkeys(("type", "name", "description", "input_schema", "strict"), ""),
    no_effect={**CACHE, "eager_input_streaming": "how events are cut"},
    only={"defer_loading": (None, False), "allowed_callers": (None, ["direct"]), "input_examples": (None, [])},
)


@dataclass(frozen=True)
class MessagesRequest:
    call: Call
    streams: bool

    def body(self, answer: Answer) -> dict[str, Any]:
        choice = answer.choices[0]
        return {
            **_frame(answer),
            "content": blocks_of(choice.message, answer.id),
            "stop_reason": "stop_sequence" if choice.stop else STOPS[choice.finish],
            "stop_sequence": choice.stop or None,
            "usage": _usage(answer, answer.completion_tokens),
        }

    def events(self, answer: Answer) -> Iterator[bytes]:
        whole = self.body(answer)
        opening = {**whole, "content": [], "stop_reason": None, "stop_sequence": None, "usage": _usage(answer, 0)}
        yield _event("message_start", message=opening)
        for at, block in enumerate(whole["content"]):
            begun, deltas = _pieces(block)
            yield _event("content_block_start", index=at, content_block=begun)
            for delta in deltas:
                yield _event("content_block_delta", index=at, delta=delta)
            yield _event("content_block_stop", index=at)
        ended = {"stop_reason": whole["stop_reason"], "stop_sequence": whole["stop_sequence"]}
        yield _event("message_delta", delta=ended, usage=whole["usage"])
        yield _event("message_stop")


class Messages:
    request_id = b"request-id"

    def read(self, body: Mapping[str, Any], hints: Mapping[str, str]) -> MessagesRequest:
        if body.get("max_tokens") is None:
            raise CallRefused(
                "max_tokens is missing. Send the most tokens that the reply may have.", field="max_tokens"
            )
        return MessagesRequest(self.call_of(body, hints), a_flag(body, "stream", False))

    def call_of(self, body: Mapping[str, Any], hints: Mapping[str, str]) -> Call:
        """The call; also for a request that only counts tokens and gives no bound on them."""
        FIELDS.check(body)
        tools, left_out = _tools(body)
        if (managed := body.get("context_management")) and an_object(managed, "context_management").get("edits"):
            left_out += ("context_management",)
        choice = an_object(body.get("tool_choice") or {"type": "auto"}, "tool_choice")
        messages = [
            message
            for at, one in enumerate(a_list(body.get("messages"), "messages"))
            for message in a_turn(one, f"messages[{at}]")
        ]
        if system := text_of(body.get("system"), "system", ("text",), "\n"):
            messages.insert(0, {"role": "system", "content": system})
        return Call(
            "messages",
            a_name(body.get("model"), "model"),
            messages=with_one_system(messages),
            tools=tools,
            tool_choice=_choice(choice, bool(tools)),
            parallel_tool_calls=not a_flag(choice, "disable_parallel_tool_use", False),
            stop=stops(body.get("stop_sequences"), "stop_sequences"),
            max_tokens=an_integer(body, "max_tokens", 1, MOST_TOKENS),
            sampling=FIELDS.wishes(body),
            left_out=left_out,
            hints=hints,
        )

    def error(self, refused: CallRefused) -> dict[str, Any]:
        kind = ERRORS.get(refused.status, "invalid_request_error" if refused.status < 500 else "api_error")
        return {"type": "error", "error": {"type": kind, "message": str(refused)}, "request_id": None}

    def error_events(self, refused: CallRefused) -> Iterable[bytes]:
        yield event(self.error(refused), "error")


def _tools(body: Mapping[str, Any]) -> tuple[tuple[dict[str, Any], ...], tuple[str, ...]]:
    """The tools that the model sees, and those that are left out."""
    tools, left_out = [], []
    given = a_list(body.get("tools") or [], "tools")
    for at, one in enumerate(given):
        path = f"tools[{at}]"
        tool = an_object(one, path)
        kind = tool.get("type") or "custom"
        if isinstance(kind, str) and kind.startswith(HOSTED):
            left_out.append(f"tools: {kind[:40]}")
            continue
        if kind != "custom":
            raise CallRefused(
                f"{path} has the type {shown(str(kind))}, which only Anthropic's models know: give it an input_schema.",
                field=path,
                code="unsupported_tool",
            )
        TOOL.check(tool, path)
        function: dict[str, Any] = {"name": a_name(tool.get("name"), f"{path}.name")}
        if tool.get("description") is not None:
            function["description"] = a_text(tool["description"], f"{path}.description")
        function["parameters"] = a_schema(tool.get("input_schema"), f"{path}.input_schema")
        tools.append({"type": "function", "function": function})
    return tuple(tools), (*left_out, *strictness(given))


def _choice(given: Mapping[str, Any], has_tools: bool) -> str:
    kind = given.get("type")
    if kind in ("auto", "none"):
        return str(kind)
    if kind == "any":
        if not has_tools:
            raise CallRefused(
                "tool_choice is any, but the request has no tools. Send tools, or leave it out.", field="tool_choice"
            )
        return "required"
    if kind == "tool":
        return f"tool:{a_name(given.get('name'), 'tool_choice.name')}"
    raise wrong("tool_choice.type", "auto, any, tool or none")


def _frame(answer: Answer) -> dict[str, Any]:
    return {"id": f"msg_{answer.id}", "type": "message", "role": "assistant", "model": answer.model}


def _usage(answer: Answer, output_tokens: int) -> dict[str, Any]:
    """The usage. Anthropic counts input tokens without the cached ones."""
    return {
        "input_tokens": answer.prompt_tokens - answer.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": answer.cached_tokens,
        "output_tokens": output_tokens,
    }


def _pieces(block: Mapping[str, Any]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The beginning of a block, and the pieces that are added to it."""
    if block["type"] == "text":
        return {"type": "text", "text": ""}, [{"type": "text_delta", "text": block["text"]}]
    if block["type"] == "thinking":
        begun = {"type": "thinking", "thinking": "", "signature": ""}
        thought = {"type": "thinking_delta", "thinking": block["thinking"]}
        return begun, [thought, {"type": "signature_delta", "signature": block["signature"]}]
    return {**block, "input": {}}, [{"type": "input_json_delta", "partial_json": arguments_text(block["input"])}]


def _event(kind: str, **values: Any) -> bytes:
    return event({"type": kind, **values}, kind)

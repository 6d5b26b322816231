"""OpenAI's chat completions: `POST /v1/chat/completions`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from atropos_agent_api.calls import Answer, Call, CallRefused, Choice
from atropos_agent_api.dialects.dialect import event, openai_error
from atropos_agent_api.dialects.fields import Fields, shown
from atropos_agent_api.dialects.values import (
    MOST_CHOICES,
    MOST_TOKENS,
    a_flag,
    a_list,
    a_name,
    a_schema,
    a_text,
    an_integer,
    an_object,
    arguments_of,
    arguments_text,
    number,
    number_but,
    stops,
    text_of,
    word,
    writable,
    wrong,
)
from atropos_core.types import Message

FIELDS = Fields(
    read={
        "model": "any name; the policy answers, and the answer has this name",
        "messages": "the conversation",
        "tools": "of type function",
        "tool_choice": "auto, none, required or one function, where the model's format can begin a call",
        "parallel_tool_calls": "false: a reply ends with its first call",
        "n": f"1 to {MOST_CHOICES} choices",
        "stop": "where a reply ends; what was sampled past it is not shown and not trained",
        "max_tokens": "at most as many as the run samples",
        "max_completion_tokens": "the same; it is the newer name",
        "logprobs": "of the tokens that were sampled",
        "stream": "server-sent events",
        "stream_options": "include_usage: one more event with the usage",
        "response_format": "text",
    },
    no_effect={
        "user": "who calls is known by the key",
        "safety_identifier": "who calls is known by the key",
        "metadata": "for dashboards",
        "service_tier": "there is one",
        "prompt_cache_key": "the session knows its own history",
        "prompt_cache_options": "the session knows its own history",
        "prompt_cache_retention": "the session knows its own history",
    },
    only={
        "store": (None, False),
        "top_logprobs": (None, 0),
        "modalities": (None, ["text"]),
        "logit_bias": (None, {}),
        "functions": (None, []),
        "function_call": (None,),
        "audio": (None,),
        "prediction": (None,),
        "web_search_options": (None,),
        "moderation": (None,),
    },
    sampling={
        "temperature": number(0, 2),
        "top_p": number(0, 1),
        "top_k": number(-1, 2**31),
        "seed": number(-(2**63), 2**63),
        "frequency_penalty": number_but(0, -2, 2),
        "presence_penalty": number_but(0, -2, 2),
        "repetition_penalty": number_but(1, 0, 10),
        "reasoning_effort": word,
        "verbosity": word,
    },
)
STREAM_OPTIONS = Fields(
    read={"include_usage": "one more event with the usage"}, no_effect={"include_obfuscation": "nothing is padded"}
)
OF_MESSAGES = {
    "system": Fields(read=dict.fromkeys(("role", "content", "name"), "")),
    "user": Fields(read=dict.fromkeys(("role", "content", "name"), "")),
    "tool": Fields(read=dict.fromkeys(("role", "content", "tool_call_id", "name"), "")),
    "assistant": Fields(
        read=dict.fromkeys(("role", "content", "name", "tool_calls", "reasoning_content", "reasoning"), ""),
        no_effect={"refusal": "null, or shown to people", "annotations": "of hosted tools"},
        only={"audio": (None,), "function_call": (None,)},
    ),
}  # `cache_control` and the like of other servers' clients are refused by name
FUNCTION = Fields(read=dict.fromkeys(("type", "name", "description", "parameters", "strict"), ""))
ROLES = {"developer": "system"}


@dataclass(frozen=True)
class ChatRequest:
    call: Call
    streams: bool
    with_usage: bool

    def body(self, answer: Answer) -> dict[str, Any]:
        return {
            "id": f"chatcmpl-{answer.id}",
            "object": "chat.completion",
            "created": answer.created,
            "model": answer.model,
            "choices": [
                {
                    "index": at,
                    "message": shown_message(choice.message),
                    "logprobs": shown_logprobs(choice) if self.call.logprobs else None,
                    "finish_reason": choice.finish,
                }
                for at, choice in enumerate(answer.choices)
            ],
            "usage": usage(answer),
        }

    def events(self, answer: Answer) -> Iterator[bytes]:
        frame = {
            "id": f"chatcmpl-{answer.id}",
            "object": "chat.completion.chunk",
            "created": answer.created,
            "model": answer.model,
        }
        if self.with_usage:
            frame["usage"] = None

        def chunk(at: int, delta: dict[str, Any], finish: str | None = None, logprobs: Any = None) -> bytes:
            choice = {"index": at, "delta": delta, "logprobs": logprobs, "finish_reason": finish}
            return event({**frame, "choices": [choice]})

        for at, choice in enumerate(answer.choices):
            message = shown_message(choice.message)
            logprobs = shown_logprobs(choice) if self.call.logprobs else None
            yield chunk(at, {"role": "assistant", "content": ""}, None, logprobs)
            if reasoning := message.get("reasoning_content"):
                yield chunk(at, {"reasoning_content": reasoning})
            if message["content"]:
                yield chunk(at, {"content": message["content"]})
            for number_, call in enumerate(message.get("tool_calls", ())):
                begun = {**call, "function": {"name": call["function"]["name"], "arguments": ""}}
                yield chunk(at, {"tool_calls": [{"index": number_, **begun}]})
                arguments = {"function": {"arguments": call["function"]["arguments"]}}
                yield chunk(at, {"tool_calls": [{"index": number_, **arguments}]})
            yield chunk(at, {}, choice.finish)
        if self.with_usage:
            yield event({**frame, "choices": [], "usage": usage(answer)})
        yield b"data: [DONE]\n\n"


class Chat:
    request_id = b"x-request-id"

    def read(self, body: Mapping[str, Any], hints: Mapping[str, str]) -> ChatRequest:
        FIELDS.check(body)
        tools = tuple(
            a_function(one, f"tools[{at}]") for at, one in enumerate(a_list(body.get("tools") or [], "tools"))
        )
        options = an_object(body.get("stream_options") or {}, "stream_options")
        STREAM_OPTIONS.check(options, "stream_options")
        form = an_object(body.get("response_format") or {"type": "text"}, "response_format")
        if form.get("type") != "text":
            raise CallRefused(
                "response_format can only be text here: the policy's replies are not constrained.",
                field="response_format",
                code="unsupported_parameter",
            )
        bounds = [an_integer(body, name, 1, MOST_TOKENS) for name in ("max_tokens", "max_completion_tokens")]
        call = Call(
            "chat",
            a_name(body.get("model"), "model"),
            messages=tuple(
                a_message(one, f"messages[{at}]") for at, one in enumerate(a_list(body.get("messages"), "messages"))
            ),
            tools=tools,
            tool_choice=a_choice(body.get("tool_choice"), bool(tools)),
            parallel_tool_calls=a_flag(body, "parallel_tool_calls", True),
            n=an_integer(body, "n", 1, MOST_CHOICES) or 1,
            stop=stops(body.get("stop"), "stop"),
            max_tokens=min((bound for bound in bounds if bound is not None), default=None),
            sampling=FIELDS.wishes(body),
            left_out=strictness(one.get("function") for one in body.get("tools") or ()),
            logprobs=a_flag(body, "logprobs", False),
            hints=hints,
        )
        return ChatRequest(call, a_flag(body, "stream", False), a_flag(options, "include_usage", False))

    def error(self, refused: CallRefused) -> dict[str, Any]:
        return openai_error(refused)

    def error_events(self, refused: CallRefused) -> Iterable[bytes]:
        yield event(openai_error(refused))


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
        raise CallRefused(f"{path}.type can only be 'function' here.", field=f"{path}.type")
    function = an_object(given.get("function"), f"{path}.function")
    return {
        "id": a_text(given.get("id"), f"{path}.id"),
        "type": "function",
        "function": {
            "name": a_name(function.get("name"), f"{path}.function.name"),
            "arguments": arguments_of(function.get("arguments"), f"{path}.function.arguments"),
        },
    }


def a_function(value: Any, path: str) -> dict[str, Any]:
    """A tool of chat's form."""
    given = an_object(value, path)
    if given.get("type") != "function":
        raise CallRefused(
            f"{path} is of the type {shown(str(given.get('type')))}, and this API takes functions.",
            field=f"{path}.type",
            code="unsupported_tool",
        )
    return function_tool(an_object(given.get("function"), f"{path}.function"), f"{path}.function")


def function_tool(given: Mapping[str, Any], path: str, schema: str = "parameters") -> dict[str, Any]:
    """The description of a function, as templates show it."""
    FUNCTION.check(given, path)
    function: dict[str, Any] = {"name": a_name(given.get("name"), f"{path}.name")}
    if given.get("description") is not None:
        function["description"] = a_text(given["description"], f"{path}.description")
    function["parameters"] = a_schema(given.get(schema), f"{path}.{schema}")
    return {"type": "function", "function": function}


def strictness(functions: Iterable[Any]) -> tuple[str, ...]:
    """As Call.left_out: nothing constrains the arguments that the policy writes."""
    return ("tools: strict",) if any(isinstance(one, dict) and one.get("strict") for one in functions) else ()


def a_choice(value: Any, has_tools: bool) -> str:
    """As Call.tool_choice."""
    if value is None:
        return "auto"
    if isinstance(value, str):
        if value not in ("auto", "none", "required"):
            raise wrong("tool_choice", "auto, none, required or an object that names a function")
        if value == "required" and not has_tools:
            raise CallRefused("tool_choice is required, and there are no tools.", field="tool_choice")
        return value
    given = an_object(value, "tool_choice")
    if given.get("type") != "function":
        raise CallRefused(
            f"tool_choice of the type {shown(str(given.get('type')))} is not supported.",
            field="tool_choice",
            code="unsupported_parameter",
        )
    named = given if "name" in given else an_object(given.get("function"), "tool_choice.function")
    return f"tool:{a_name(named.get('name'), 'tool_choice.function.name')}"


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


def shown_logprobs(choice: Choice) -> dict[str, Any]:
    return {
        "content": [
            {"token": text, "logprob": logprob, "bytes": list(text.encode()), "top_logprobs": []}
            for text, logprob in zip(choice.texts, choice.logprobs.tolist(), strict=True)
        ],
        "refusal": None,
    }


def usage(answer: Answer) -> dict[str, Any]:
    return {
        "prompt_tokens": answer.prompt_tokens,
        "completion_tokens": answer.completion_tokens,
        "total_tokens": answer.prompt_tokens + answer.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": answer.cached_tokens},
    }

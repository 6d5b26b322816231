"""OpenAI's responses: `POST /v1/responses`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import orjson

from atropos_agent_api.calls import Answer, Call, CallRefused
from atropos_agent_api.dialects.chat import shown_logprobs
from atropos_agent_api.dialects.chat_messages import with_one_system
from atropos_agent_api.dialects.dialect import event
from atropos_agent_api.dialects.fields import Fields, unsupported
from atropos_agent_api.dialects.openai import OpenAIDialect
from atropos_agent_api.dialects.response_items import HOSTED, Tools, flat_name, messages_of, output_of, tools_of
from atropos_agent_api.dialects.tools import a_choice
from atropos_agent_api.dialects.values import (
    MOST_TOKENS,
    a_flag,
    a_list,
    a_name,
    a_text,
    an_integer,
    an_object,
    number,
    word,
    wrong,
)

LOGPROBS, SEALED = "message.output_text.logprobs", "reasoning.encrypted_content"
OF_HOSTED = {
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
}  # never produced here, so asking for them leaves nothing out


def _effort(value: Any, name: str) -> str | None:
    given = an_object(value if value is not None else {}, name)
    REASONING.check(given, name)
    return word(given.get("effort"), f"{name}.effort")


def _verbosity(value: Any, name: str) -> str | None:
    given = an_object(value if value is not None else {}, name)
    TEXT.check(given, name)
    form = an_object(given.get("format") or {"type": "text"}, f"{name}.format")
    if form.get("type") != "text":
        raise unsupported(f"{name}.format", f"{name}.format can only be text here: replies are not constrained")
    return word(given.get("verbosity"), f"{name}.verbosity")


REASONING = Fields(
    read={"effort": "how much to think"},
    no_effect={
        "summary": "there is none",
        "generate_summary": "there is none",
        "context": "the history is what is sent",
    },
)
TEXT = Fields(read={"format": "", "verbosity": ""})
FIELDS = Fields(
    read={
        "model": "any name; the policy answers, and the answer has this name",
        "input": "a text, or items: message, function_call, function_call_output, reasoning",
        "instructions": "the system's message",
        "max_output_tokens": "at most as many as the run samples",
        "tools": "functions and namespaces of them; those that OpenAI's servers run are left out, and counted",
        "tool_choice": "auto, none, required or one function, if the model's format can begin a call",
        "parallel_tool_calls": "false: a reply ends with its first call",
        "include": f"{LOGPROBS}, {SEALED}",
        "stream": "server-sent events",
    },
    no_effect={
        "user": "who calls is known by the key",
        "safety_identifier": "who calls is known by the key",
        "client_metadata": "who calls is known by the key",
        "metadata": "sent back",
        "service_tier": "there is one",
        "stream_options": "nothing is padded",
        "prompt_cache_key": "the session knows its own history",
        "prompt_cache_options": "the session knows its own history",
        "prompt_cache_retention": "the session knows its own history",
        "max_tool_calls": "of tools that OpenAI's servers run",
    },
    only={
        "store": (None, False),
        "background": (None, False),
        "previous_response_id": (None,),
        "conversation": (None,),
        "prompt": (None,),
        "truncation": (None, "disabled"),
        "top_logprobs": (None, 0),
        "context_management": (None, []),
        "moderation": (None,),
        "access_programs": (None,),
        "background_options": (None,),
        "image": (None,),
    },
    sampling={"temperature": number(0, 2), "top_p": number(0, 1), "reasoning": _effort, "text": _verbosity},
)
ECHOED = (
    "tools",
    "tool_choice",
    "instructions",
    "max_output_tokens",
    "metadata",
    "temperature",
    "top_p",
    "user",
    "reasoning",
    "text",
)


@dataclass(frozen=True)
class ResponsesRequest:
    call: Call
    streams: bool
    echo: Mapping[str, orjson.Fragment]  # fields of the request that the response repeats
    tools: Tools
    sealed: bool

    def body(self, answer: Answer) -> dict[str, Any]:
        choice = answer.choices[0]
        logprobs = shown_logprobs(choice)["content"] if self.call.logprobs else []
        items = output_of(choice, answer.id, self.tools.namespaces, sealed=self.sealed, logprobs=logprobs)
        is_whole = choice.finish != "length"
        return {
            **self._frame(answer),
            "status": "completed" if is_whole else "incomplete",
            "incomplete_details": None if is_whole else {"reason": "max_output_tokens"},
            "output": items,
            "usage": {
                "input_tokens": answer.prompt_tokens,
                "input_tokens_details": {"cached_tokens": answer.cached_tokens, "cache_write_tokens": 0},
                "output_tokens": answer.completion_tokens,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": answer.prompt_tokens + answer.completion_tokens,
            },
        }

    def events(self, answer: Answer) -> Iterator[bytes]:
        whole = self.body(answer)
        begun = {**whole, "status": "in_progress", "incomplete_details": None, "output": [], "usage": None}
        kinds = [("response.created", {"response": begun}), ("response.in_progress", {"response": begun})]
        for at, item in enumerate(whole["output"]):
            kinds += _item_events(at, item)
        kinds.append((f"response.{whole['status']}", {"response": whole}))
        for number_, (kind, values) in enumerate(kinds):
            yield event({"type": kind, "sequence_number": number_, **values}, kind)

    def _frame(self, answer: Answer) -> dict[str, Any]:
        return {
            "id": f"resp_{answer.id}",
            "object": "response",
            "created_at": answer.created,
            "model": answer.model,
            "error": None,
            "parallel_tool_calls": self.call.parallel_tool_calls,
            **self.echo,
        }


class Responses(OpenAIDialect):
    def read(self, body: Mapping[str, Any], hints: Mapping[str, str]) -> ResponsesRequest:
        FIELDS.check(body)
        tools = tools_of(a_list(body.get("tools") or [], "tools"))
        wanted = _include(body.get("include"))
        call = Call(
            "responses",
            a_name(body.get("model"), "model"),
            messages=_messages(body),
            tools=tuple(tools.seen),
            tool_choice=_choice(body.get("tool_choice"), tools),
            parallel_tool_calls=a_flag(body, "parallel_tool_calls", True),
            max_tokens=an_integer(body, "max_output_tokens", 1, MOST_TOKENS),
            sampling=FIELDS.wishes(body),
            left_out=tuple(tools.left_out),
            logprobs=LOGPROBS in wanted,
            hints=hints,
        )
        return ResponsesRequest(call, a_flag(body, "stream", False), _echo(body), tools, SEALED in wanted)

    def error_events(self, refused: CallRefused) -> Iterable[bytes]:
        """Some clients look for the first event, codex for the second."""
        said = {"code": refused.code, "message": str(refused)}
        error = {**said, "param": refused.field or None, **self.error(refused)}
        yield event({"type": "error", "sequence_number": 0, **error}, "error")
        response = {"object": "response", "status": "failed", "error": {**said, "code": "server_error"}}
        yield event({"type": "response.failed", "sequence_number": 1, "response": response}, "response.failed")


def _echo(body: Mapping[str, Any]) -> dict[str, orjson.Fragment]:
    """The repeated fields, encoded once, since a stream contains them three times."""
    given = {"tools": [], "tool_choice": "auto"} | {name: body[name] for name in ECHOED if body.get(name) is not None}
    try:
        return {name: orjson.Fragment(orjson.dumps(value)) for name, value in given.items()}
    except TypeError:
        raise CallRefused("this request is nested too deeply. Send a flatter one.", code="invalid_json") from None


def _messages(body: Mapping[str, Any]) -> Any:
    given = body.get("input")
    if isinstance(given, str):
        messages: list[Any] = [{"role": "user", "content": given}] if given else []
    else:
        messages = messages_of(a_list(given, "input"))
    if not messages:
        raise wrong("input", "a text that is not empty, or a list of items")
    if instructions := a_text(body.get("instructions") or "", "instructions"):
        messages.insert(0, {"role": "system", "content": instructions})
    return with_one_system(messages)


def _include(value: Any) -> set[str]:
    wanted = set()
    for at, one in enumerate(a_list(value if value is not None else [], "include")):
        if not isinstance(one, str) or one not in {LOGPROBS, SEALED, *OF_HOSTED}:
            raise unsupported(f"include[{at}]", f"include[{at}] is not supported")
        wanted.add(one)
    return wanted


def _choice(value: Any, tools: Tools) -> str:
    """The choice. A hosted tool may be left out, but not if the client says that it must be called."""
    if isinstance(value, dict):
        kind = value.get("type")
        if isinstance(kind, str) and kind.startswith(HOSTED):
            raise CallRefused(
                f"tool_choice asks for {kind[:40]!r}, which only OpenAI's servers run. Ask for a function of yours, or leave it out.",
                field="tool_choice",
                code="unsupported_tool",
            )
        if kind == "function" and value.get("namespace"):
            named = flat_name(
                a_name(value["namespace"], "tool_choice.namespace"), a_name(value.get("name"), "tool_choice.name")
            )
            return f"tool:{named}"
    return a_choice(value, bool(tools.seen))


def _item_events(at: int, item: Mapping[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    where = {"item_id": item["id"], "output_index": at}
    begun = {**item, "status": "in_progress"} if "status" in item else dict(item)
    if item["type"] == "function_call":
        begun["arguments"] = ""
        within = [
            ("response.function_call_arguments.delta", {**where, "delta": item["arguments"]}),
            ("response.function_call_arguments.done", {**where, "arguments": item["arguments"]}),
        ]
    else:
        begun["content"] = []
        begun.pop("encrypted_content", None)
        [part] = item["content"]
        where["content_index"] = 0
        is_text = part["type"] == "output_text"
        name = "response.output_text" if is_text else "response.reasoning_text"
        shorter = [
            {name: one[name] for name in ("token", "logprob", "top_logprobs")} for one in part.get("logprobs", ())
        ]
        logprobs = {"logprobs": shorter} if is_text else {}
        within = [
            ("response.content_part.added", {**where, "part": {**part, "text": ""}}),
            (f"{name}.delta", {**where, "delta": part["text"], **logprobs}),
            (f"{name}.done", {**where, "text": part["text"], **logprobs}),
            ("response.content_part.done", {**where, "part": part}),
        ]
    return [
        ("response.output_item.added", {"output_index": at, "item": begun}),
        *within,
        ("response.output_item.done", {"output_index": at, "item": dict(item)}),
    ]

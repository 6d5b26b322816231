"""OpenAI's chat completions: `POST /v1/chat/completions`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from atropos_agent_api.calls import Answer, Call, CallRefused, Choice
from atropos_agent_api.dialects.chat_messages import a_message, shown_message, with_one_system
from atropos_agent_api.dialects.fields import Fields
from atropos_agent_api.dialects.openai import SAMPLING, OpenAIDialect, stream, usage, wants_usage
from atropos_agent_api.dialects.tools import a_choice, a_function, strictness
from atropos_agent_api.dialects.values import (
    MOST_CHOICES,
    MOST_TOKENS,
    a_flag,
    a_list,
    a_name,
    an_integer,
    an_object,
    stops,
    word,
)

FIELDS = Fields(
    read={
        "model": "any name; the policy answers, and the answer has this name",
        "messages": "the conversation",
        "tools": "of type function",
        "tool_choice": "auto, none, required or one function, if the model's format can begin a call",
        "parallel_tool_calls": "false: a reply ends with its first call",
        "n": f"1 to {MOST_CHOICES} choices",
        "stop": "texts at which a reply ends; tokens sampled past it are not shown and not trained",
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
    sampling={**SAMPLING, "reasoning_effort": word, "verbosity": word},
)


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
        return stream(frame, self._chunks(answer), answer, with_usage=self.with_usage)

    def _chunks(self, answer: Answer) -> Iterator[dict[str, Any]]:
        def chunk(at: int, delta: dict[str, Any], finish: str | None = None, logprobs: Any = None) -> dict[str, Any]:
            return {"index": at, "delta": delta, "logprobs": logprobs, "finish_reason": finish}

        for at, choice in enumerate(answer.choices):
            message = shown_message(choice.message)
            logprobs = shown_logprobs(choice) if self.call.logprobs else None
            yield chunk(at, {"role": "assistant", "content": ""}, None, logprobs)
            if reasoning := message.get("reasoning_content"):
                yield chunk(at, {"reasoning_content": reasoning})
            if message["content"]:
                yield chunk(at, {"content": message["content"]})
            for number, call in enumerate(message.get("tool_calls", ())):
                begun = {**call, "function": {"name": call["function"]["name"], "arguments": ""}}
                yield chunk(at, {"tool_calls": [{"index": number, **begun}]})
                arguments = {"function": {"arguments": call["function"]["arguments"]}}
                yield chunk(at, {"tool_calls": [{"index": number, **arguments}]})
            yield chunk(at, {}, choice.finish)


class Chat(OpenAIDialect):
    def read(self, body: Mapping[str, Any], hints: Mapping[str, str]) -> ChatRequest:
        FIELDS.check(body)
        tools = tuple(
            a_function(one, f"tools[{at}]") for at, one in enumerate(a_list(body.get("tools") or [], "tools"))
        )
        with_usage = wants_usage(body)
        form = an_object(body.get("response_format") or {"type": "text"}, "response_format")
        if form.get("type") != "text":
            raise CallRefused(
                "response_format can only be text here: the policy's replies are not constrained. Leave it out.",
                field="response_format",
                code="unsupported_parameter",
            )
        bounds = [an_integer(body, name, 1, MOST_TOKENS) for name in ("max_tokens", "max_completion_tokens")]
        call = Call(
            "chat",
            a_name(body.get("model"), "model"),
            messages=with_one_system(
                [a_message(one, f"messages[{at}]") for at, one in enumerate(a_list(body.get("messages"), "messages"))]
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
        return ChatRequest(call, a_flag(body, "stream", False), with_usage)


def shown_logprobs(choice: Choice) -> dict[str, Any]:
    return {
        "content": [
            {"token": text, "logprob": logprob, "bytes": list(text.encode()), "top_logprobs": []}
            for text, logprob in zip(choice.texts, choice.logprobs.tolist(), strict=True)
        ],
        "refusal": None,
    }

"""OpenAI's completions of a text: `POST /v1/completions`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np

from atropos_agent_api.calls import Answer, Call, CallRefused, Choice
from atropos_agent_api.dialects.fields import Fields
from atropos_agent_api.dialects.openai import SAMPLING, OpenAIDialect, stream, usage, wants_usage
from atropos_agent_api.dialects.values import (
    MOST_CHOICES,
    MOST_TOKENS,
    a_flag,
    a_name,
    an_integer,
    stops,
    writable,
    wrong,
)
from atropos_core.types import Tokens

FIELDS = Fields(
    read={
        "model": "any name; the policy answers, and the answer has this name",
        "prompt": "one text, or the token ids of one",
        "n": f"1 to {MOST_CHOICES} choices",
        "stop": "texts at which a reply ends; tokens sampled past it are not shown and not trained",
        "max_tokens": "at most as many as the run samples; without it, as many as the run samples",
        "logprobs": "0: of the tokens that were sampled",
        "stream": "server-sent events",
        "stream_options": "include_usage: one more event with the usage",
    },
    no_effect={"user": "who calls is known by the key"},
    only={"echo": (None, False), "suffix": (None, ""), "best_of": (None, 1), "logit_bias": (None, {})},
    sampling=SAMPLING,
)


@dataclass(frozen=True)
class CompletionsRequest:
    call: Call
    streams: bool
    with_usage: bool

    def body(self, answer: Answer) -> dict[str, Any]:
        choices = [self._choice(at, choice) for at, choice in enumerate(answer.choices)]
        return {**_frame(answer), "choices": choices, "usage": usage(answer)}

    def events(self, answer: Answer) -> Iterator[bytes]:
        choices = (self._choice(at, choice) for at, choice in enumerate(answer.choices))
        return stream(_frame(answer), choices, answer, with_usage=self.with_usage)

    def _choice(self, at: int, choice: Choice) -> dict[str, Any]:
        text = writable(choice.message.get("content") or "")
        logprobs = _logprobs(choice) if self.call.logprobs else None
        return {"index": at, "text": text, "logprobs": logprobs, "finish_reason": choice.finish}


class Completions(OpenAIDialect):
    def read(self, body: Mapping[str, Any], hints: Mapping[str, str]) -> CompletionsRequest:
        FIELDS.check(body)
        with_usage = wants_usage(body)
        if an_integer(body, "logprobs", 0, 5):
            raise CallRefused(
                "logprobs can only be 0: those of the sampled tokens, without alternatives. Send 0, or leave it out.",
                field="logprobs",
                code="unsupported_parameter",
            )
        call = Call(
            "completions",
            a_name(body.get("model"), "model"),
            prompt=_prompt(body.get("prompt")),
            n=an_integer(body, "n", 1, MOST_CHOICES) or 1,
            stop=stops(body.get("stop"), "stop"),
            max_tokens=an_integer(body, "max_tokens", 1, MOST_TOKENS),
            sampling=FIELDS.wishes(body),
            logprobs=body.get("logprobs") is not None,
            hints=hints,
        )
        return CompletionsRequest(call, a_flag(body, "stream", False), with_usage)


def _prompt(value: Any) -> str | Tokens:
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], str | list):
        return _prompt(value[0])
    if isinstance(value, str):
        return value
    expected = "one text, or a list of token ids: several prompts are several calls"
    if not isinstance(value, list) or not all(type(one) is int and 0 <= one <= MOST_TOKENS for one in value):
        raise wrong("prompt", expected)
    return np.asarray(value, dtype=np.int32)


def _frame(answer: Answer) -> dict[str, Any]:
    return {
        "id": f"cmpl-{answer.id}",
        "object": "text_completion",
        "created": answer.created,
        "model": answer.model,
    }


def _logprobs(choice: Choice) -> dict[str, Any]:
    return {
        "tokens": list(choice.texts),
        "token_logprobs": choice.logprobs.tolist(),
        "top_logprobs": None,
        "text_offset": list(accumulate(map(len, choice.texts[:-1]), initial=0)) if choice.texts else [],
    }

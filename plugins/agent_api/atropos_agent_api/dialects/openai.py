"""Parts of OpenAI's APIs that are the same in several of them: errors, options of streams, sampling, usage."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from atropos_agent_api.calls import Answer, CallRefused
from atropos_agent_api.dialects.dialect import event
from atropos_agent_api.dialects.fields import Fields, Wish
from atropos_agent_api.dialects.values import a_flag, an_object, number, number_but

SAMPLING: Mapping[str, Wish] = {
    "temperature": number(0, 2),
    "top_p": number(0, 1),
    "top_k": number(-1, 2**31),
    "min_p": number(0, 1),
    "seed": number(-(2**63), 2**63),
    "frequency_penalty": number_but(0, -2, 2),
    "presence_penalty": number_but(0, -2, 2),
    "repetition_penalty": number_but(1, 0, 10),
}
STREAM_OPTIONS = Fields(
    read={"include_usage": "one more event with the usage"}, no_effect={"include_obfuscation": "nothing is padded"}
)


class OpenAIDialect:
    """The part of a `Dialect` that is the same in each of OpenAI's APIs."""

    request_id = b"x-request-id"

    def error(self, refused: CallRefused) -> dict[str, Any]:
        kinds = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 409: "conflict_error"}
        kind = kinds.get(refused.status, "invalid_request_error" if refused.status < 500 else "server_error")
        return {"error": {"message": str(refused), "type": kind, "param": refused.field or None, "code": refused.code}}

    def error_events(self, refused: CallRefused) -> Iterable[bytes]:
        yield event(self.error(refused))


def wants_usage(body: Mapping[str, Any]) -> bool:
    """True if `stream_options` asks for the usage. Raises CallRefused."""
    options = an_object(body.get("stream_options") or {}, "stream_options")
    STREAM_OPTIONS.check(options, "stream_options")
    return a_flag(options, "include_usage", False)


def stream(
    frame: dict[str, Any], choices: Iterable[Mapping[str, Any]], answer: Answer, *, with_usage: bool
) -> Iterator[bytes]:
    """One event per choice or part of one, then the usage if it is wanted, and the end. `frame`: the fields of every event."""
    if with_usage:
        frame = {**frame, "usage": None}
    for choice in choices:
        yield event({**frame, "choices": [choice]})
    if with_usage:
        yield event({**frame, "choices": [], "usage": usage(answer)})
    yield b"data: [DONE]\n\n"


def usage(answer: Answer) -> dict[str, Any]:
    return {
        "prompt_tokens": answer.prompt_tokens,
        "completion_tokens": answer.completion_tokens,
        "total_tokens": answer.prompt_tokens + answer.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": answer.cached_tokens},
    }

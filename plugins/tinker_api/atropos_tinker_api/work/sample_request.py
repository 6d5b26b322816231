"""The body of `asample`, and what the engine is asked for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from atropos_core.errors import DataError
from atropos_core.group_schema import MOST_STOP_IDS
from atropos_core.types import Sampling, Tokens
from atropos_tinker_api.http.fields import Fields
from atropos_tinker_api.work.operations import Limits

MOST_SAMPLES = 1024
MOST_TOP = 1000
MOST_STOPS, MOST_STOP_CHARACTERS = 64, 1000
NOT_HERE = {
    "target_prompt_logprobs": "logprobs of chosen tokens of the prompt (target_prompt_logprobs)",
    "prompt_alt_tokens_k": "alternatives to the prompt's tokens (prompt_alt_tokens_k)",
    "record_stability_info": "stability information (record_stability_info)",
}


@dataclass(frozen=True)
class SampleRequest:
    """One request. `ends`: a token that ends a turn of the model ends a sample."""

    prompt: Tokens
    n: int
    sampling: Sampling
    ends: bool
    seed: int | None
    prompt_logprobs: bool
    last_n: int | None  # prompt tokens to score; None: all
    top_prompt: int
    top_sample: int


def read_sample_request(given: Fields, limits: Limits) -> SampleRequest:
    """Raises DataError."""
    for name, what in NOT_HERE.items():
        if given.value(name):
            raise DataError(f"{what} are not offered by this server.", remedy="Leave it out.")
    prompt = _prompt(given.fields("prompt"), limits)
    params = given.fields("sampling_params")
    room = limits.context - len(prompt) if limits.context else None
    most = params.integer_or_none("max_tokens")
    if most is None and room is None:
        raise DataError("sampling_params.max_tokens is missing, and the model does not say how long its context is.")
    if most is None:
        most = room or 0
    if most < 1 or (room is not None and most > room):
        raise DataError(
            f"the prompt has {len(prompt)} tokens, and max_tokens is {most}: the model's context is {limits.context} tokens."
            if room is not None
            else f"max_tokens is {most}: it must be 1 or more."
        )
    top_k = params.integer("top_k", -1, least=-1, most=1 << 31)
    stop_ids, stops, ends = _stop(params.value("stop"), limits)
    sampling = Sampling(
        max_tokens=most,
        temperature=_in(params.number("temperature", 1.0), 0.0, 100.0, "temperature"),
        top_p=_in(params.number("top_p", 1.0), 1e-6, 1.0, "top_p"),
        top_k=max(top_k, 0),
        stop_ids=stop_ids,
        stop=stops,
    )
    prompt_logprobs = given.truth("prompt_logprobs", False)
    last_n = given.integer_or_none("prompt_logprobs_last_n")
    if last_n is not None and (not prompt_logprobs or not 1 <= last_n < len(prompt)):
        raise DataError(
            f"prompt_logprobs_last_n needs prompt_logprobs, and is from 1 to {len(prompt) - 1} for this prompt."
        )
    return SampleRequest(
        prompt,
        given.integer("num_samples", 1, least=1, most=MOST_SAMPLES),
        sampling,
        ends,
        params.integer_or_none("seed"),
        prompt_logprobs,
        last_n,
        given.integer("topk_prompt_logprobs", 0, least=0, most=MOST_TOP),
        given.integer("topk_sample_logprobs", 0, least=0, most=MOST_TOP),
    )


def _prompt(given: Fields, limits: Limits) -> Tokens:
    tokens: list[Any] = []
    for index, chunk in enumerate(given.items("chunks")):
        one = Fields(chunk, f"prompt.chunks[{index}].")
        if (kind := one.text("type", "encoded_text")) != "encoded_text":
            raise DataError(
                f"the prompt has a chunk of type {kind[:50]!r}.", remedy="This server samples only from text."
            )
        tokens += one.items("tokens")
    if not tokens:
        raise DataError("the prompt has no tokens.")
    if any(type(token) is not int or not 0 <= token < limits.vocabulary for token in tokens):
        raise DataError(f"the prompt has something other than token ids from 0 to {limits.vocabulary - 1}.")
    return np.array(tokens, np.int32)


def _stop(value: Any, limits: Limits) -> tuple[tuple[int, ...], tuple[str, ...], bool]:
    """Return stop ids, stop texts, and True if the model's own end tokens end a sample: not for an empty list."""
    if value is None:
        return (), (), True
    if isinstance(value, str):
        value = [value]
    if not isinstance(value, list):
        raise DataError("sampling_params.stop must be a text, a list of texts, a list of token ids, or null.")
    if all(type(one) is int for one in value):
        if len(value) > MOST_STOP_IDS or not all(0 <= one < limits.vocabulary for one in value):
            raise DataError(f"sampling_params.stop must have at most {MOST_STOP_IDS:,} token ids of the vocabulary.")
        return tuple(value), (), bool(value)
    if len(value) > MOST_STOPS or not all(
        isinstance(one, str) and 0 < len(one) <= MOST_STOP_CHARACTERS for one in value
    ):
        raise DataError(
            f"sampling_params.stop must have at most {MOST_STOPS} texts of 1 to {MOST_STOP_CHARACTERS} characters."
        )
    return (), tuple(value), True


def _in(value: float, least: float, most: float, name: str) -> float:
    if not least <= value <= most:
        raise DataError(f"sampling_params.{name} is {value:g}: it must be from {least:g} to {most:g}.")
    return value


def sequence_ids(request_id: str, n: int) -> Sequence[str]:
    """Return an id for each sample, which the client puts on it."""
    return [f"{request_id}:{index}" for index in range(n)]

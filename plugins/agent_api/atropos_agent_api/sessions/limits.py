"""Limits of a call: the run's decisions, and bounds of the session and of the model."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from atropos_agent_api.calls import CALLS_USED, Call, CallRefused
from atropos_agent_api.sessions.options import SessionOptions
from atropos_core.guards.worker_threads import characters
from atropos_core.types import Sampling

MOST_CHARACTERS = 2_000_000  # of a prompt: each may be a token
TOKEN_CHARACTERS = 48  # more than any useful prompt has per token on average; each value of a message adds apart.VALUE


def check_call(call: Call) -> None:
    """Raises CallRefused for a call that cannot be answered."""
    if not call.messages and (call.prompt is None or not len(call.prompt)):
        what = "prompt" if call.dialect == "completions" else "messages"
        raise CallRefused(
            f"{what} is empty: there is nothing to answer. Send at least one message, or a text.", field=what
        )
    if call.n < 1:
        raise CallRefused(f"n is {call.n}, but an answer has at least one choice. Send 1 or more.", field="n")
    if call.max_tokens is not None and call.max_tokens < 1:
        raise CallRefused(
            f"max_tokens is {call.max_tokens}, but an answer has at least one. Send 1 or more, or leave it out.",
            field="max_tokens",
        )


def overruled(call: Call, run: Sampling) -> Mapping[str, Any]:
    """The call's sampling that differs from the run's, and the parts of the call that the model does not see."""
    differing = {name: value for name, value in call.sampling.items() if value != getattr(run, name, None)}
    return {**differing, **dict.fromkeys(call.left_out, "left out")}


def check_sampling(call: Call, run: Sampling, options: SessionOptions) -> None:
    """Raises CallRefused if such differences may not be overruled."""
    if options.client_sampling == "overrule":
        return
    for name, wanted in overruled(call, run).items():
        why = f"{name} is {wanted}, but this run samples with {getattr(run, name, 'its own')}"
        raise CallRefused(
            f"{f'{name} is not passed to the model' if name in call.left_out else why}: leave it out, or have the run "
            'overrule what calls ask for (sampling = "overrule").',
            field=name.partition(":")[0],
            code="unsupported_parameter",
        )


def check_calls(answered: int, options: SessionOptions) -> None:
    """Raises CallRefused if the session has no call left."""
    if options.max_calls and answered >= options.max_calls:
        raise CallRefused(
            f"this session has used all of its {options.max_calls} calls. {CALLS_USED}", status=403, code="call_limit"
        )


def check_requests(arrived: int, options: SessionOptions) -> None:
    """Raises CallRefused if there were too many requests besides answered calls. `arrived`: the number of requests of any kind."""
    if options.max_calls and arrived > 2 * options.max_calls:
        raise CallRefused(
            f"this session has sent more than {2 * options.max_calls} requests: it may have {options.max_calls} calls, and as many "
            f"requests that are refused or count tokens. {CALLS_USED}",
            status=403,
            code="call_limit",
        )


def check_length(call: Call, options: SessionOptions) -> None:
    """Raises CallRefused, before rendering, for a prompt with more characters than fit into the context, or than any call may
    have."""
    if not isinstance(call.prompt, str | None):
        return
    given = (call.messages, call.tools, call.prompt)
    most, why = options.context_tokens * TOKEN_CHARACTERS, ""
    if most and characters(given, most) > most:
        why = f"{most:,} characters, {TOKEN_CHARACTERS} for each of the {options.context_tokens} tokens of the model's context"
    elif characters(given, MOST_CHARACTERS, 0) > MOST_CHARACTERS:
        why = f"{MOST_CHARACTERS:,} characters"
    if why:
        raise CallRefused(
            f"the prompt has more than {why}: send a shorter one.",
            field="messages" if call.prompt is None else "prompt",
            code="context_length_exceeded",
        )


class TokenBudget:
    """The tokens that a session may sample; 0 for any number. A call takes its largest possible number before it samples, and
    returns the rest afterwards, so calls at once cannot exceed the limit together. A call that fails returns nothing, since it may
    have sampled all of them."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._taken = 0
        self._calls = 0  # that have taken tokens and not yet returned the rest
        self._changed = asyncio.Event()

    async def take(self, n: int, wanted: int) -> int:
        """Return how many tokens each of `n` replies may have, up to `wanted`. If too few are left, wait for calls under way, which
        may return some, and only then return less. Raises CallRefused if there is not one token for each."""
        while self._most:
            left = (self._most - self._taken) // n
            if left >= wanted or (not self._calls and left > 0):
                wanted = min(wanted, left)
                break
            if not self._calls:
                raise CallRefused(
                    f"this session has used {self._taken} of its {self._most} sampled tokens: too few are left for {n} "
                    f"{'reply' if n == 1 else 'replies'}. End the episode here, or have the run allow more: limits.tokens.",
                    status=403,
                    code="token_limit",
                )
            self._changed.clear()
            await self._changed.wait()  # at the latest, a call ends at its own deadline
        self._taken += n * wanted
        self._calls += 1
        return wanted

    def give_back(self, tokens: int) -> None:
        """End a call, and return the tokens that it took but did not sample."""
        self._taken -= tokens
        self._calls -= 1
        self._changed.set()

    def close(self) -> None:
        """Stop the waiting of all calls, because the session has ended."""
        self._most = 0
        self._changed.set()


def bounded(call: Call, prompt_tokens: int, run: Sampling, options: SessionOptions) -> Sampling:
    """Return the run's sampling, with no more tokens than the call and the model's context leave. Raises CallRefused if they leave
    none."""
    bounds = [run.max_tokens]
    if call.max_tokens is not None:
        bounds.append(call.max_tokens)
    if options.context_tokens:
        bounds.append(options.context_tokens - prompt_tokens)
        if bounds[-1] < 1:
            raise CallRefused(
                f"the prompt has {prompt_tokens} tokens, but the model's context is {options.context_tokens}. Send a shorter one.",
                field="messages" if call.prompt is None else "prompt",
                code="context_length_exceeded",
            )
    return replace(run, max_tokens=min(bounds))

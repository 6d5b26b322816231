"""What a call may not have: what the run decides, and bounds of the session and of the model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from atropos_agent_api.calls import Call, CallRefused
from atropos_agent_api.sessions.options import SessionOptions
from atropos_core.types import Sampling


def check_call(call: Call) -> None:
    """Raises CallRefused for a call that nothing can answer."""
    if not call.messages and (call.prompt is None or not len(call.prompt)):
        what = "prompt" if call.dialect == "completions" else "messages"
        raise CallRefused(f"{what} is empty: there is nothing to answer.", field=what)
    if call.n < 1:
        raise CallRefused(f"n is {call.n}, and an answer has at least one choice.", field="n")
    if call.max_tokens is not None and call.max_tokens < 1:
        raise CallRefused(f"max_tokens is {call.max_tokens}, and an answer has at least one.", field="max_tokens")


def overruled(call: Call, run: Sampling) -> Mapping[str, Any]:
    """What the call wants that is not the run's own, and what of it the model does not see."""
    differing = {name: value for name, value in call.sampling.items() if value != getattr(run, name, None)}
    return {**differing, **dict.fromkeys(call.left_out, "left out")}


def check_sampling(call: Call, run: Sampling, options: SessionOptions) -> None:
    """Raises CallRefused where the session does not overrule what is not the run's own."""
    if options.client_sampling == "overrule":
        return
    for name, wanted in overruled(call, run).items():
        why = f"{name} is {wanted}, and this run samples with {getattr(run, name, 'its own')}"
        raise CallRefused(
            f"{f'{name} is not there for the model' if name in call.left_out else why}: leave it out, or have the run "
            'overrule what calls want (sampling = "overrule").',
            field=name.partition(":")[0],
            code="unsupported_parameter",
        )


def check_calls(answered: int, options: SessionOptions) -> None:
    """Raises CallRefused where the session has no call left."""
    if options.max_calls and answered >= options.max_calls:
        raise CallRefused(
            f"this session may have {options.max_calls} calls, and had them.", status=403, code="call_limit"
        )


def bounded(call: Call, prompt_tokens: int, sampled: int, run: Sampling, options: SessionOptions) -> Sampling:
    """The run's sampling with no more tokens than the call, the model's context and the session leave. Raises CallRefused
    where they leave none. `sampled`: tokens in the session so far."""
    bounds = [run.max_tokens]
    if call.max_tokens is not None:
        bounds.append(call.max_tokens)
    if options.context_tokens:
        bounds.append(options.context_tokens - prompt_tokens)
        if bounds[-1] < 1:
            raise CallRefused(
                f"the prompt has {prompt_tokens} tokens, and the model's context is {options.context_tokens}.",
                field="messages" if call.prompt is None else "prompt",
                code="context_length_exceeded",
            )
    if options.max_sampled_tokens:
        bounds.append(options.max_sampled_tokens - sampled)
        if bounds[-1] < 1:
            raise CallRefused(
                f"this session may have {options.max_sampled_tokens} sampled tokens, and had {sampled}.",
                status=403,
                code="token_limit",
            )
    return replace(run, max_tokens=min(bounds))

"""What is sampled for a call that has stop texts. Engines know ids alone: they end at each token that may be the last of a stop
text, and where it was none the same reply is continued."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from dataclasses import replace

import numpy as np

from atropos_agent_api.calls import Call
from atropos_agent_api.tokens.formats import ChatFormat
from atropos_core.group_schema import MOST_STOP_IDS
from atropos_core.interfaces import Policy
from atropos_core.seeds import derive
from atropos_core.types import Completion, Sampling, Tokens

MOST_CONTINUED = 8  # times, in one reply: an engine may compute the prompt again each time


async def sample_to_stop(
    policy: Policy, prompt: Tokens, call: Call, sampling: Sampling, seed: int, format: ChatFormat
) -> list[Completion]:
    """`call.n` completions. One may go past its stop text: its engine need not know `Sampling.stop_ids`, too many tokens may
    complete the text, or it was continued too often."""
    ids = await format.ids_that_may_complete(call.stop) if call.stop else ()
    if not 0 < len(ids) <= MOST_STOP_IDS:
        return await policy.sample(prompt, n=call.n, sampling=sampling, seed=seed)
    ended = frozenset(ids)
    first = await policy.sample(prompt, n=call.n, sampling=replace(sampling, stop_ids=tuple(sorted(ended))), seed=seed)

    async def whole(sampled: Completion, seed: int) -> Completion:
        for again in range(1, MOST_CONTINUED + 1):
            left = sampling.max_tokens - len(sampled.tokens)
            if not left or not _ended_at(sampled, ended) or await _has_stop(sampled, call, format):
                break
            stop_ids = tuple(sorted(ended)) if again < MOST_CONTINUED else ()
            [more] = await policy.sample(
                np.concatenate([prompt, sampled.tokens]),
                sampling=replace(sampling, max_tokens=left, stop_ids=stop_ids),
                seed=derive(seed, again),
            )
            sampled = _joined(sampled, more)
        return sampled

    return list(await asyncio.gather(*(whole(one, derive(seed, "stop", at)) for at, one in enumerate(first))))


def _ended_at(sampled: Completion, ids: Collection[int]) -> bool:
    return sampled.finish == "stop" and len(sampled.tokens) > 0 and int(sampled.tokens[-1]) in ids


async def _has_stop(sampled: Completion, call: Call, format: ChatFormat) -> bool:
    said = await format.text(sampled.tokens)
    return any(stop in said for stop in call.stop)


def _joined(sampled: Completion, more: Completion) -> Completion:
    return replace(
        more,
        tokens=np.concatenate([sampled.tokens, more.tokens]),
        logprobs=np.concatenate([sampled.logprobs, more.logprobs]),
        policy_version=np.concatenate([sampled.policy_version, more.policy_version]),
    )

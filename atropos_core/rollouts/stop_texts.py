"""Replies that end at a stop text. Engines see only ids, so they stop at each token that can complete a stop text. If it did not
complete one, the reply is continued. No token is split: the token that completes the text is the last one, and is kept whole.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import replace
from typing import Protocol

import numpy as np

from atropos_core.conversation import Policy
from atropos_core.group_schema import MOST_STOP_IDS
from atropos_core.seeds import derive
from atropos_core.types import Completion, Kept, RoutedExperts, Sampling, Tokens

MOST_CONTINUED = 8  # times, in one reply: an engine may compute the prompt again each time


class Texts(Protocol):
    async def text(self, ids: Tokens) -> str:
        """Return the text of these ids, without the tokens that frame a turn."""

    async def completing_ids(self, texts: Sequence[str]) -> Sequence[int]:
        """Return the tokens that can complete one of these texts; empty without a tokenizer."""


async def sample_to_stop(
    policy: Policy, prompt: Tokens, n: int, stops: Sequence[str], sampling: Sampling, seed: int, texts: Texts
) -> list[Completion]:
    """Return `n` completions. One may run past its stop text: if its engine does not support `Sampling.stop_ids`, if too many tokens
    can complete the text, or if it was continued too often. `cut_at_stop` then cuts it."""
    own = sampling.stop_ids
    ids = await texts.completing_ids(stops) if stops else ()
    if not 0 < len(ids) + len(own) <= MOST_STOP_IDS or not ids:
        return await policy.sample(prompt, n=n, sampling=sampling, seed=seed)
    ended = frozenset(ids) - frozenset(own)
    stop_ids = tuple(sorted(ended | frozenset(own)))
    first = await policy.sample(prompt, n=n, sampling=replace(sampling, stop_ids=stop_ids), seed=seed)

    async def whole(sampled: Completion, seed: int) -> Completion:
        for again in range(1, MOST_CONTINUED + 1):
            left = sampling.max_tokens - len(sampled.tokens)
            if not left or not _ended_at(sampled, ended) or await _has_stop(sampled, stops, texts):
                break
            [more] = await policy.sample(
                np.concatenate([prompt, sampled.tokens]),
                sampling=replace(sampling, max_tokens=left, stop_ids=stop_ids if again < MOST_CONTINUED else own),
                seed=derive(seed, again),
            )
            sampled = _joined(sampled, more)
        return sampled

    return list(await asyncio.gather(*(whole(one, derive(seed, "stop", at)) for at, one in enumerate(first))))


async def cut_at_stop(sampled: Completion, stops: Sequence[str], texts: Texts) -> Completion:
    """Cut a completion after the token that completes a stop text. Its `finish` is then "stop"."""
    size, stop = await end_at_stop(sampled.tokens, stops, texts.text)
    return first_tokens(sampled, size) if stop else sampled


def first_tokens(sampled: Completion, size: int) -> Completion:
    """Return the first `size` tokens of a completion, as one that ended there: its `finish` is "stop"."""
    return replace(
        sampled,
        tokens=sampled.tokens[:size],
        logprobs=sampled.logprobs[:size],
        policy_version=sampled.policy_version[:size],
        finish="stop",
        kept=None if sampled.kept is None else sampled.kept.part(size),
        experts=sampled.experts and sampled.experts.part(len(sampled.experts.known) - len(sampled.tokens) + size),
    )


async def end_at_stop(
    tokens: Tokens, stops: Sequence[str], text: Callable[[Tokens], Awaitable[str]]
) -> tuple[int, str]:
    """Return how many tokens to keep, and the stop text that they end with; all tokens and "" without one."""
    said = await text(tokens)
    found = [(said.index(stop) + len(stop), stop) for stop in stops if stop and stop in said]
    if not found:
        return len(tokens), ""
    stop = min(found)[1]

    async def has_it(size: int) -> bool:
        return stop in await text(tokens[:size])

    return await smallest(len(tokens), has_it), stop


async def smallest(most: int, holds: Callable[[int], Awaitable[bool]]) -> int:
    """Return the smallest size for which `holds` is true. It must be true for `most`, and for every larger size once it is true."""
    low, high = 0, most
    while high - low > 1:
        middle = (low + high) // 2
        if await holds(middle):
            high = middle
        else:
            low = middle
    return high


def _ended_at(sampled: Completion, ids: Collection[int]) -> bool:
    return sampled.finish == "stop" and len(sampled.tokens) > 0 and int(sampled.tokens[-1]) in ids


async def _has_stop(sampled: Completion, stops: Sequence[str], texts: Texts) -> bool:
    said = await texts.text(sampled.tokens)
    return any(stop in said for stop in stops)


def _joined(sampled: Completion, more: Completion) -> Completion:
    return replace(
        more,
        tokens=np.concatenate([sampled.tokens, more.tokens]),
        logprobs=np.concatenate([sampled.logprobs, more.logprobs]),
        policy_version=np.concatenate([sampled.policy_version, more.policy_version]),
        kept=Kept.joined(len(sampled.tokens) + len(more.tokens), [(0, sampled.kept), (len(sampled.tokens), more.kept)]),
        experts=more.experts and RoutedExperts.joined(len(more.experts.known), [sampled.experts, more.experts]),
    )

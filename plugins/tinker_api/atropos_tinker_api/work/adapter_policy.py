"""One adapter of the engine, sampled from like a policy: with stop texts, and also past the model's own end tokens."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from atropos_core.conversation import Policy
from atropos_core.rollouts.stop_texts import cut_at_stop, sample_to_stop
from atropos_core.rollouts.tokenizer import ChatTokenizer
from atropos_core.seeds import derive, of_replies
from atropos_core.stepwise import AdapterEngine
from atropos_core.types import Completion, Message, Sampling, Tokens


class AdapterPolicy(Policy):
    """`name`: the adapter; None: the base model."""

    def __init__(self, engine: AdapterEngine, name: str | None, tokenizer: ChatTokenizer, deadline_s: float) -> None:
        self.sampling = Sampling()
        self._engine = engine
        self._name = name
        self._tokenizer = tokenizer
        self._deadline_s = deadline_s

    async def complete(
        self, prompt: Tokens, n: int, sampling: Sampling, seed: int, *, ends: bool = True
    ) -> list[Completion]:
        """Return `n` completions. Without `ends`, only stop ids and max_tokens end one."""
        if sampling.stop:
            own = replace(sampling, stop=())
            sampled = await sample_to_stop(self, prompt, n, sampling.stop, own, seed, self)
            return [await cut_at_stop(one, sampling.stop, self) for one in sampled]
        sampled = await self.sample(prompt, n=n, sampling=sampling, seed=seed)
        if ends:
            return sampled
        return list(
            await asyncio.gather(
                *(self._go_past_ends(prompt, one, sampling, derive(seed, "past", at)) for at, one in enumerate(sampled))
            )
        )

    async def _go_past_ends(self, prompt: Tokens, sampled: Completion, sampling: Sampling, seed: int) -> Completion:
        again = 0
        while sampled.finish == "stop" and (left := sampling.max_tokens - len(sampled.tokens)) > 0:
            again += 1
            [more] = await self.sample(
                np.concatenate([prompt, sampled.tokens]),
                sampling=replace(sampling, max_tokens=left),
                seed=derive(seed, again),
            )
            sampled = replace(
                more,
                tokens=np.concatenate([sampled.tokens, more.tokens]),
                logprobs=np.concatenate([sampled.logprobs, more.logprobs]),
                policy_version=np.concatenate([sampled.policy_version, more.policy_version]),
                kept=None,
                experts=None,
            )
        return sampled

    async def sample(
        self,
        prompt: Tokens,
        *,
        n: int = 1,
        sampling: Sampling | None = None,
        seed: int,
        deadline_s: float | None = None,
    ) -> list[Completion]:
        limit_s = self._deadline_s if deadline_s is None else min(deadline_s, self._deadline_s)
        return await self._engine.sample_with(
            self._name, prompt, n, sampling or self.sampling, of_replies(seed, n), limit_s
        )

    async def text(self, ids: Tokens) -> str:
        return self._tokenizer.decode(ids)

    async def completing_ids(self, texts: Sequence[str]) -> Sequence[int]:
        return await asyncio.to_thread(self._tokenizer.completing_ids, texts)

    async def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        after: Tokens | None = None,
    ) -> Tokens:
        return self._tokenizer.render(messages, tools)

    async def parse(self, tokens: Tokens, *, prompt: Tokens | None = None) -> Message:
        return self._tokenizer.parse(tokens, prompt)

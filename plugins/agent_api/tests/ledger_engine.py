"""An engine that keeps its own ledger: every token that it ever sampled, each with a logprob that no other token has."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from atropos_core.interfaces import Engine, ModelInfo
from atropos_core.processes.endpoints import LocalEndpoint
from atropos_core.rollouts.engine_policy import EnginePolicy
from atropos_core.rollouts.tokenizer import ChatTokenizer
from atropos_core.types import Completion, Floats, Sampling, Tokens, Versions

STEP = 2.0**-10  # between one logprob and the next: exact in 32 bits


@dataclass(frozen=True)
class Entry:
    """One sample, as the engine made it."""

    prompt: Tokens
    tokens: Tokens
    logprobs: Floats
    versions: Versions
    seed: int


class LedgerEngine(Engine):
    """Replies with `say(prompt as text, seed)`, ended by the tokenizer's eos token. `hold` keeps samples back until it is
    set."""

    def __init__(self, tokenizer: ChatTokenizer, say: Callable[[str, int], str]) -> None:
        self.ledger: list[Entry] = []
        self.endpoint = LocalEndpoint(self)
        self.hold = asyncio.Event()
        self.hold.set()
        self.asked = 0  # times that it was asked for samples
        self.end = tokenizer.eos  # of every reply
        self.knows_stop_ids = False
        self._tokenizer = tokenizer
        self._say = say
        self._sampled = 0

    async def open(self) -> ModelInfo:
        return ModelInfo("Ledger", 0, self._tokenizer.vocabulary, "float32", "cpu", self._tokenizer.fingerprint)

    async def sample(
        self, prompt: Tokens, n: int, sampling: Sampling, seeds: Sequence[int], deadline_s: float
    ) -> list[Completion]:
        self.asked += 1
        await self.hold.wait()
        for _ in range(self.steps(seeds[0])):
            await asyncio.sleep(0)
        return [self._one(prompt, seed, sampling) for seed in seeds]

    async def until_asked(self, times: int) -> None:
        async with asyncio.timeout(20):
            while self.asked < times:
                await asyncio.sleep(0.001)

    def steps(self, seed: int) -> int:
        """Of the event loop, that a sample takes."""
        return 1

    async def pause(self) -> None: ...

    async def resume(self, version: int) -> None: ...

    def ids(self, prompt: Tokens, seed: int) -> Tokens:
        """The sampled ids, without the end."""
        return self._tokenizer.encode(self._say(self._tokenizer.decode(prompt, keep_special=True), seed))

    def _one(self, prompt: Tokens, seed: int, sampling: Sampling) -> Completion:
        end = self._tokenizer.encode(self.end)
        ids = np.concatenate([self.ids(prompt, seed), end])
        ids = ids[: sampling.max_tokens]
        if self.knows_stop_ids and (at := np.flatnonzero(np.isin(ids, sampling.stop_ids))).size:
            end = ids[at[0] : at[0] + 1]
            ids = ids[: at[0] + 1]
        numbers = np.arange(self._sampled, self._sampled + len(ids))
        self._sampled += len(ids)
        is_whole = bool(ids[-1] == end[0])
        entry = Entry(prompt, ids, -((numbers + 1) * STEP).astype(np.float32), (numbers // 7).astype(np.int32), seed)
        self.ledger.append(entry)
        return Completion(
            entry.tokens, entry.logprobs, entry.versions, "stop" if is_whole else "length", sampling.temperature
        )


def policy_of(engine: LedgerEngine, tokenizer: ChatTokenizer, *, max_tokens: int = 400) -> EnginePolicy:
    return EnginePolicy(engine, tokenizer, Sampling(max_tokens=max_tokens), deadline_s=20)

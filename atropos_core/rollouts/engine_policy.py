"""The policy as environments see it: an engine and a tokenizer, with a deadline on every sample."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

from atropos_core.conversation import Policy
from atropos_core.errors import DataError
from atropos_core.guards.deadlines import within
from atropos_core.guards.worker_threads import apart_if_long
from atropos_core.interfaces import Engine
from atropos_core.rollouts.stop_texts import cut_at_stop, sample_to_stop
from atropos_core.rollouts.tokenizer import ChatTokenizer
from atropos_core.seeds import of_replies
from atropos_core.types import Completion, Message, Sampling, Tokens

ScheduleKey = tuple[int, ...]


class Turnstile:
    """Holds samples back until every running rollout waits for one, then lets all pass in the order of their rollouts.

    Which requests share a batch then depends only on the rollouts, not on timing. A deterministic run needs this, because a
    neighbour in a batch shifts logprobs by 1e-5. A rollout is identified by its key, a tuple of numbers.
    """

    def __init__(self) -> None:
        self._running: set[ScheduleKey] = set()
        self._waiting: list[tuple[ScheduleKey, asyncio.Future[None]]] = []

    def enter(self, key: ScheduleKey) -> None:
        """Add a running rollout: until it waits here, or has left, no sample passes."""
        self._running.add(key)

    def leave(self, key: ScheduleKey) -> None:
        self._running.discard(key)
        self._look()

    async def wait(self, key: ScheduleKey) -> None:
        entry = (key, asyncio.get_running_loop().create_future())
        self._waiting.append(entry)
        self._look()
        try:
            await entry[1]
        except asyncio.CancelledError:
            if entry in self._waiting:
                self._waiting.remove(entry)
            raise

    def _look(self) -> None:
        asyncio.get_running_loop().call_soon(self._release)  # later: a rollout may ask for several samples in one turn

    def _release(self) -> None:
        if self._waiting and self._running <= {key for key, _ in self._waiting}:
            waiting, self._waiting = self._waiting, []
            for _, future in sorted(waiting, key=lambda entry: entry[0]):
                if not future.done():
                    future.set_result(None)


class ChatFormat(Protocol):
    """Converts messages to ids and back: a `ChatTokenizer`, or its replacement if the model is elsewhere."""

    def render(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None = None) -> Tokens: ...
    def extend(
        self, messages: Sequence[Message], history: Tokens, tools: Sequence[Mapping[str, Any]] | None = None
    ) -> Tokens: ...
    def parse(self, ids: Tokens, prompt: Tokens | None = None) -> Message: ...


class _Texts:
    def __init__(self, tokenizer: ChatTokenizer) -> None:
        self._tokenizer = tokenizer

    async def text(self, ids: Tokens) -> str:
        return self._tokenizer.decode(ids)

    async def completing_ids(self, texts: Sequence[str]) -> Sequence[int]:
        return await asyncio.to_thread(self._tokenizer.completing_ids, texts)


class EnginePolicy(Policy):
    """One rollout's view of the engine. `key` is its position among the rollouts of a deterministic run."""

    def __init__(
        self,
        engine: Engine,
        tokenizer: ChatFormat,
        sampling: Sampling,
        *,
        deadline_s: float,
        turnstile: Turnstile | None = None,
        key: ScheduleKey = (),
    ) -> None:
        self.sampling = sampling
        self._engine = engine
        self._tokenizer = tokenizer
        self._deadline_s = deadline_s
        self._turnstile = turnstile
        self._key = key
        self.tools: Sequence[Mapping[str, Any]] = ()  # that the last prompt was rendered with

    async def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        after: Tokens | None = None,
    ) -> Tokens:
        self.tools = tools or self.tools
        if after is not None:
            return await apart_if_long((messages, tools), self._tokenizer.extend, messages, after, tools)
        return await apart_if_long((messages, tools), self._tokenizer.render, messages, tools)

    async def sample(
        self,
        prompt: Tokens,
        *,
        n: int = 1,
        sampling: Sampling | None = None,
        seed: int,
        deadline_s: float | None = None,
    ) -> list[Completion]:
        if not len(prompt):
            raise DataError("a prompt of no tokens cannot be continued")
        sampling = sampling or self.sampling
        deadline_s = self._deadline_s if deadline_s is None else min(deadline_s, self._deadline_s)
        if sampling.stop and isinstance(self._tokenizer, ChatTokenizer):  # others have the engine see to it
            ending, texts = replace(sampling, stop=()), _Texts(self._tokenizer)
            sampled = await within(
                sample_to_stop(self, prompt, n, sampling.stop, ending, seed, texts), deadline_s, "the engine: sample()"
            )
            return [await cut_at_stop(one, sampling.stop, texts) for one in sampled]
        if self._turnstile is not None:
            await self._turnstile.wait(self._key)
        return await within(
            self._engine.sample(prompt, n, sampling, of_replies(seed, n), deadline_s),
            deadline_s,
            "the engine: sample()",
        )

    async def parse(self, tokens: Tokens, *, prompt: Tokens | None = None) -> Message:
        return self._tokenizer.parse(tokens, prompt)

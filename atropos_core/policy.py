"""The policy as environments see it: an engine and a tokenizer, with a deadline on every sample."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Mapping, Sequence
from typing import Any, TypeVar

from atropos_core.contained import contained
from atropos_core.errors import DataError, DeadlineExceeded
from atropos_core.interfaces import Engine, Policy
from atropos_core.seeds import derive
from atropos_core.tokenizer import ChatTokenizer
from atropos_core.types import Completion, Message, Sampling, Tokens

T = TypeVar("T")
Place = tuple[int, ...]


class Turnstile:
    """Holds samples back until every play in progress waits for one, then lets all pass in the order of their plays.

    With it, which requests share a batch depends on the plays alone and not on timing: what a deterministic run needs,
    since a neighbour in a batch shifts logprobs by 1e-5. A play is known by its place, a tuple of numbers.
    """

    def __init__(self) -> None:
        self._playing: set[Place] = set()
        self._waiting: list[tuple[Place, asyncio.Future[None]]] = []

    def enter(self, place: Place) -> None:
        """One more play is in progress: until it waits here, or has left, nobody passes."""
        self._playing.add(place)

    def leave(self, place: Place) -> None:
        self._playing.discard(place)
        self._look()

    async def wait(self, place: Place) -> None:
        entry = (place, asyncio.get_running_loop().create_future())
        self._waiting.append(entry)
        self._look()
        try:
            await entry[1]
        except asyncio.CancelledError:
            if entry in self._waiting:
                self._waiting.remove(entry)
            raise

    def _look(self) -> None:
        asyncio.get_running_loop().call_soon(self._release)  # later: a play may ask for several samples in one turn

    def _release(self) -> None:
        if self._waiting and self._playing <= {place for place, _ in self._waiting}:
            waiting, self._waiting = self._waiting, []
            for _, future in sorted(waiting, key=lambda entry: entry[0]):
                if not future.done():
                    future.set_result(None)


class EnginePolicy(Policy):
    """One play's view of the engine. `place` is where it stands among others in a deterministic run."""

    def __init__(
        self,
        engine: Engine,
        tokenizer: ChatTokenizer,
        sampling: Sampling,
        *,
        deadline_s: float,
        turnstile: Turnstile | None = None,
        place: Place = (),
    ) -> None:
        self.sampling = sampling
        self._engine = engine
        self._tokenizer = tokenizer
        self._deadline_s = deadline_s
        self._turnstile = turnstile
        self._place = place

    async def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        after: Tokens | None = None,
    ) -> Tokens:
        if after is not None:
            return self._tokenizer.extend(messages, after, tools)
        return self._tokenizer.render(messages, tools)

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
        deadline_s = self._deadline_s if deadline_s is None else min(deadline_s, self._deadline_s)
        seeds = [seed] if n == 1 else [derive(seed, i) for i in range(n)]
        if self._turnstile is not None:
            await self._turnstile.wait(self._place)
        return await within(
            self._engine.sample(prompt, n, sampling or self.sampling, seeds, deadline_s),
            deadline_s,
            "the engine: sample()",
        )

    async def parse(self, tokens: Tokens) -> Message:
        return self._tokenizer.parse(tokens)


async def within(what: Awaitable[T], deadline_s: float, name: str) -> T:
    """The result of `what`, or DeadlineExceeded that names it. A TimeoutError of its own passes unchanged; where it
    ends by a cancellation that came from inside it, or by what ends a process, that is an error like any other."""
    try:
        async with asyncio.timeout(deadline_s) as limit:
            with contained(name):
                return await what
    except TimeoutError:
        if not limit.expired():
            raise
        raise DeadlineExceeded(f"{name} gave no answer within {deadline_s:g} s") from None
    except asyncio.CancelledError as error:
        current = asyncio.current_task()
        if current is None or current.cancelling():
            raise
        raise RuntimeError(f"{name} awaited something that was cancelled") from error

"""The engines that the server names, as one engine. If a trainer is resumed elsewhere, its workers follow it."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Sequence

from atropos_core.errors import AccessRefused, ApiError, DeadlineExceeded, HubFull, ProcessDied
from atropos_core.interfaces import Engine, ModelInfo
from atropos_core.rollouts.engine_router import EngineRouter
from atropos_core.types import Completion, Sampling, Tokens

LOOK_S = 0.5  # between two requests for the engines' names, while samples wait


class NamedEngines(Engine):
    """Sample from the engines that `named()` returns now. If an engine goes away, its samples are drawn again from the
    others, with the same prompt and seeds. `ask` updates the names."""

    def __init__(
        self, named: Callable[[], Sequence[str]], ask: Callable[[], Awaitable[None]], make: Callable[[str], Engine]
    ) -> None:
        self._named = named
        self._ask = ask
        self._make = make
        self._engines: dict[str, Engine] = {}
        self._fleet: tuple[tuple[str, ...], Engine] | None = None
        self._looking: asyncio.Task[None] | None = None

    async def open(self) -> ModelInfo:
        raise NotImplementedError("the engines are opened in their own processes")

    async def sample(
        self, prompt: Tokens, n: int, sampling: Sampling, seeds: Sequence[int], deadline_s: float
    ) -> list[Completion]:
        until = time.monotonic() + deadline_s
        trouble = "the server names none: is there a trainer?"
        while (left := until - time.monotonic()) > 0:
            urls = tuple(self._named())
            if urls:
                sampling_now = asyncio.ensure_future(self._of(urls).sample(prompt, n, sampling, seeds, left))
                try:
                    while not sampling_now.done() and tuple(self._named()) == urls:
                        await asyncio.wait({sampling_now}, timeout=LOOK_S)
                    if sampling_now.done():
                        return sampling_now.result()
                    trouble = f"{', '.join(urls)} went away"
                except AccessRefused:
                    raise
                except (
                    ApiError,
                    HubFull,
                    ProcessDied,
                ) as error:  # the trainer's: it may be started again, or have room again
                    trouble = Exception.__str__(error)
                finally:
                    sampling_now.cancel()
                    await asyncio.gather(sampling_now, return_exceptions=True)
            await self._look(until - time.monotonic())
        raise DeadlineExceeded(f"no engine gave a sample within {deadline_s:g} s: {trouble}")

    async def pause(self) -> None:
        raise NotImplementedError("the trainer pauses them")

    async def resume(self, version: int) -> None:
        raise NotImplementedError("the trainer resumes them")

    async def close(self) -> None:
        engines, self._engines, self._fleet = self._engines, {}, None
        if self._looking is not None:
            self._looking.cancel()
            await asyncio.gather(self._looking, return_exceptions=True)
        await asyncio.gather(*(engine.close() for engine in engines.values()))

    async def _look(self, left: float) -> None:
        """Wait for the next list of engines, or until the time is over: one request for all waiting samples."""
        if self._looking is None or self._looking.done():
            self._looking = asyncio.create_task(self._look_later())
        looking = self._looking
        await asyncio.wait({looking}, timeout=max(left, 0.0))
        if looking.done() and not looking.cancelled():
            looking.result()

    async def _look_later(self) -> None:
        await asyncio.sleep(LOOK_S)
        with contextlib.suppress(ApiError):
            await self._ask()

    def _of(self, urls: tuple[str, ...]) -> Engine:
        if self._fleet is None or self._fleet[0] != urls:
            for url in urls:
                if url not in self._engines:
                    self._engines[url] = self._make(url)
            chosen = [self._engines[url] for url in urls]
            self._fleet = (urls, chosen[0] if len(chosen) == 1 else EngineRouter(chosen, deterministic=False))
        return self._fleet[1]

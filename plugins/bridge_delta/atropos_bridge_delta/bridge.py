"""The supervisor's part: the trainer encodes what changed, and every engine receives and checks it. Then all apply it while paused.

Pieces go over the run's existing connections: to a child of this or another machine, or by HTTP to an `atropos engine`. So no disk is
shared, and nothing listens for this bridge. Engines continue to sample while an update is encoded and sent; they stop only to apply it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from atropos_bridge_delta.config import DeltaBridgeOptions
from atropos_core import console
from atropos_core.errors import AtroposError
from atropos_core.interfaces import Endpoint, Engine, Publication
from atropos_core.plugins.bridges import PublishingBridge, all_or_none
from atropos_core.plugins.provider import RunContext
from atropos_torch_models.tensors import of_all

PIECE_BYTES = 1 << 20
CLOSE_S = 5.0
PIECES = 4  # under way at once: a link's delay costs nothing, and a request to the engine waits behind 4 MB at most


class DeltaBridge(PublishingBridge):
    """The trainer's process keeps a copy of the weights published last; each engine knows its own state."""

    def __init__(self, options: DeltaBridgeOptions, context: RunContext) -> None:
        super().__init__(context, options.every)
        self._options = options
        self._model = context.model
        self.update: Mapping[str, Any] = {}  # the facts of the last one: state, size, changed of elements, least

    def extensions(self) -> Mapping[Literal["engine", "trainer"], str]:
        return {
            "engine": "atropos_bridge_delta.engine_extension:EngineExtension",
            "trainer": "atropos_bridge_delta.trainer_extension:TrainerExtension",
        }

    async def connect(self, trainer: Endpoint, engines: Sequence[Engine]) -> None:
        """Check by a digest that the engines have loaded the trainer's model. An engine with other weights gets a full copy, as
        version 0. Raises WeightsMismatch if it has another model."""
        self._trainer, self._engines = trainer, engines
        told = await all_or_none([self._engine(engine, "open") for engine in engines])
        described = of_all([one for one in told if one is not None])
        async with self._paused_by_errors():
            opened = await self._trainer_call("open", described, self._options.dtype)
            await all_or_none([engine.pause() for engine in engines])
            states = await all_or_none([self._begin(engine, opened) for engine in engines])
            if behind := [one for one, state in zip(engines, states, strict=True) if state != opened["state"]]:
                whole = await self._send_whole(behind, "has other weights than the trainer begins with")
                await all_or_none([self._engine(one, "apply", whole["base"], whole["state"]) for one in behind])
            await all_or_none([engine.resume(0) for engine in engines])

    async def close(self) -> None:
        """Remove what was written on the engines' machines. If an engine has ended, it has removed it, or the next engine there will."""
        engines, self._engines = self._engines, ()
        leaving = [engine.endpoint.call("close", deadline_s=CLOSE_S) for engine in engines]
        for ended in await asyncio.gather(*leaving, return_exceptions=True):
            if isinstance(ended, BaseException) and not isinstance(ended, AtroposError):
                raise ended

    async def _publish(self, version: int) -> Publication:
        began = time.perf_counter()
        self.update = update = await self._trainer_call("encode")
        states = await all_or_none([self._engine(engine, "state") for engine in self._engines])
        ready = [engine for engine, state in zip(self._engines, states, strict=True) if state == update["base"]]
        behind = [engine for engine in self._engines if engine not in ready]
        await self._send(update, ready)
        sent = update["size"] * len(ready)
        made = [update]
        if behind:
            made.append(await self._send_whole(behind, f"has not the weights that version {version} is told by"))
            sent += made[-1]["size"] * len(behind)
        await all_or_none(
            [self._commit(engine, "" if engine in behind else update["base"], version) for engine in self._engines]
        )
        return Publication(version, time.perf_counter() - began, sent, sum(one["size"] for one in made))

    async def _commit(self, engine: Engine, base: str, version: int) -> None:
        async with engine.paused(version):
            await self._engine(engine, "apply", base, self.update["state"])

    async def _send_whole(self, engines: Sequence[Engine], why: str) -> Mapping[str, Any]:
        whole: Mapping[str, Any] = await self._trainer_call("whole")
        console.say(f"bridge delta: {_count(len(engines))} {why}: a full copy of {whole['size'] / 1e6:.1f} MB is sent.")
        await self._send(whole, engines)
        return whole

    async def _send(self, update: Mapping[str, Any], engines: Sequence[Engine]) -> None:
        """Send every piece to each of these engines. They then have checked the whole update, and have changed nothing yet."""
        room = asyncio.Semaphore(PIECES)

        async def pass_on(offset: int) -> None:
            async with room:
                piece = await self._trainer_call("read", update["kind"], offset, PIECE_BYTES)
                await all_or_none([self._engine(engine, "take", update["state"], offset, piece) for engine in engines])

        if engines:
            await all_or_none([pass_on(offset) for offset in range(0, update["size"], PIECE_BYTES)])
            facts = update["state"], update["size"], update["digest"]
            await all_or_none([self._engine(engine, "check", *facts) for engine in engines])

    async def _begin(self, engine: Engine, opened: Mapping[str, Any]) -> str:
        directory = "" if engine.outlives_run else str(self._model)  # elsewhere it may be another
        state: str = await self._engine(
            engine, "begin", opened["tensors"], opened["state"], directory, opened["config"]
        )
        return state

    async def _trainer_call(self, method: str, *arguments: Any) -> Any:
        answer, _ = await self._trainer.call(method, *arguments, deadline_s=self._options.deadline_s)
        return answer

    async def _engine(self, engine: Engine, method: str, *arguments: Any) -> Any:
        answer, _ = await engine.endpoint.call(method, *arguments, deadline_s=self._options.deadline_s)
        return answer


def _count(engines: int) -> str:
    return "an engine" if engines == 1 else f"each of {engines} engines"

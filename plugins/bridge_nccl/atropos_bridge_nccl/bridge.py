"""The supervisor's part: it has trainer and engines join one process group. At each update the trainer sends and the engines receive.

No weights pass through this process. Engines continue to sample while the optimiser writes, and are paused during each broadcast.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any, Literal

from atropos_bridge_nccl import BROKE_OFF
from atropos_bridge_nccl.config import NcclBridgeOptions
from atropos_core import console
from atropos_core.errors import DeadlineExceeded, ProcessDied
from atropos_core.guards.endings import raise_first
from atropos_core.interfaces import Endpoint, Engine, Publication
from atropos_core.plugins.bridges import PublishingBridge, all_or_none
from atropos_core.plugins.provider import RunContext
from atropos_torch_models.tensors import of_all

REASON_S = 10.0  # for the others, once one end has failed: who is gone is known a moment later than who misses it
SLACK_S = 10.0  # of a call over the deadline of what it does


class NcclBridge(PublishingBridge):
    """Rank 0 is the trainer's first process, then come the processes that have an engine's weights, engine by engine."""

    def __init__(self, options: NcclBridgeOptions, context: RunContext) -> None:
        super().__init__(context, options.every)
        self._options = options
        self._model = context.model
        self._tensors: Sequence[Sequence[Any]] = ()
        self._receivers = 0

    def extensions(self) -> Mapping[Literal["engine", "trainer"], str]:
        return {
            "engine": "atropos_bridge_nccl.engine_extension:extension_for",
            "trainer": "atropos_bridge_nccl.trainer_extension:TrainerExtension",
        }

    async def connect(self, trainer: Endpoint, engines: Sequence[Engine]) -> None:
        """Connect the ends. Nothing is sent yet, because the engines have loaded the trainer's model. Raises WeightsMismatch if they do
        not have the same tensors, FitError if the ends do not meet."""
        self._trainer, self._engines = trainer, engines
        told = await all_or_none([self._call(engine.endpoint, "open") for engine in engines])
        described = of_all([one["tensors"] for one in told if one["tensors"] is not None])
        directory = str(self._model) if any(one["tensors"] is None for one in told) else ""
        opened = await self._call(trainer, "open", described, trainer.host, directory)
        self._tensors = opened["tensors"]
        kinds = {opened["device"], *(kind for one in told for kind in one["devices"])}
        self._receivers = sum(len(one["devices"]) for one in told)
        if len(kinds) > 1:
            console.say(
                f"bridge nccl: weights pass host memory and gloo, since they are on {' and '.join(sorted(kinds))}."
            )
        where = {
            "host": opened["host"],
            "port": opened["port"],
            "size": 1 + self._receivers,
            "backend": "nccl" if kinds == {"cuda"} else "gloo",
            "number": secrets.randbits(62),
            "deadline_s": self._options.deadline_s,
        }
        joining, rank = [self._call(trainer, "join", where)], 1
        for engine, one in zip(engines, told, strict=True):
            joining.append(self._call(engine.endpoint, "join", where, rank))
            rank += len(one["devices"])
        await self._together(joining)

    async def _publish(self, version: int) -> Publication:
        began = time.perf_counter()
        await self._call(self._trainer, "check")
        await all_or_none([engine.pause() for engine in self._engines])
        receiving = [self._call(engine.endpoint, "receive", version, self._tensors) for engine in self._engines]
        size, *_ = await self._together([self._call(self._trainer, "send", version), *receiving])
        await all_or_none([engine.resume(version) for engine in self._engines])
        return Publication(version, time.perf_counter() - began, bytes_copied=size * self._receivers)

    async def _call(self, end: Endpoint, method: str, *arguments: Any) -> Any:
        answer, _ = await end.call(method, *arguments, deadline_s=self._options.deadline_s + SLACK_S)
        return answer

    async def _together(self, calls: Sequence[Coroutine[Any, Any, Any]]) -> list[Any]:
        """Return the answers of the trainer, then of each engine; they wait for each other. If a process has ended, that error is raised
        rather than those it caused in others. Processes that do not answer are named. Any still waiting in the group end with the run."""
        tasks = [asyncio.ensure_future(call) for call in calls]
        try:
            _, pending = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
            if pending:
                await asyncio.wait(tasks, timeout=REASON_S)
            errors = [error for task in tasks if task.done() and (error := task.exception()) is not None]
            silent = [number for number, task in enumerate(tasks) if not task.done()]
            if silent and all(BROKE_OFF in str(error) for error in errors):
                names = ", ".join(f"engine {number - 1}" if number else "the trainer" for number in silent)
                errors.append(DeadlineExceeded(f"bridge 'nccl' waits for {names} in vain."))
            raise_first(sorted(errors, key=lambda error: (not isinstance(error, ProcessDied), BROKE_OFF in str(error))))
            return [task.result() for task in tasks]
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

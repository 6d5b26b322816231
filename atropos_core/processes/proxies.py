"""Engines, trainers and rewards in child processes, with the same interfaces as in this process."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, TypeVar

from atropos_core.console.waits import waited
from atropos_core.errors import ProcessDied, RemoteError
from atropos_core.interfaces import Reward, Trainer, Writing
from atropos_core.processes.child import CALL_DEADLINE_S, OPEN_DEADLINE_S, STEP_DEADLINE_S, Child
from atropos_core.processes.endpoints import PeerEndpoint
from atropos_core.processes.forwarding import (
    Forwarding,
    ForwardingAdapters,
    ForwardingEngine,
    ForwardingStepwise,
    ForwardingTrainer,
    Method,
    methods,
)
from atropos_core.processes.replaceable import ReplaceableChild
from atropos_core.processes.reward_metrics import ReportedMetrics
from atropos_core.stepwise import AdapterEngine, StepwiseTrainer
from atropos_core.turn_rewards import Placed
from atropos_core.types import Batch, Episode, Floats, Metrics, Score, Task

T = TypeVar("T")

BRINGS_DEADLINE = frozenset({"sample", "sample_with"})  # as its last argument
DEADLINES_S = {  # of other calls
    "open": OPEN_DEADLINE_S,
    "load_weights": OPEN_DEADLINE_S,
    "load_adapter": OPEN_DEADLINE_S,
    "pause": CALL_DEADLINE_S,
    "resume": CALL_DEADLINE_S,
    "release_cache": CALL_DEADLINE_S,
    "step_metrics": CALL_DEADLINE_S,
    **dict.fromkeys(
        ("logprobs", "top_logprobs", "rounding", "step", "supervised_step", "token_values", "save", "restore"),
        STEP_DEADLINE_S,
    ),
    **dict.fromkeys(methods(StepwiseTrainer) + methods(AdapterEngine), STEP_DEADLINE_S),
}


class Hosted(Forwarding):
    """A component in a child process. When it is closed, the process ends."""

    def __init__(self, child: Child) -> None:
        self.child = child
        self.endpoint = PeerEndpoint(child.peer)

    async def forward(self, method: Method[T], *arguments: Any) -> T:
        name = method.__name__
        deadline_s = arguments[-1] if name in BRINGS_DEADLINE else DEADLINES_S[name]
        calling: Awaitable[T] = self.child.peer.call(name, *arguments, deadline_s=deadline_s)
        if name == "open":
            return await waited(f"{self.child.role} to load {self.child.loads}", calling)
        return await calling

    async def close(self) -> None:
        await self.child.close()


class HostedEngine(Hosted, ForwardingEngine):
    """An engine in a child process."""

    async def pause(self) -> None:
        await super().pause()
        self.child.paused = True

    async def resume(self, version: int) -> None:
        self.child.paused = False
        await super().resume(version)


class HostedTrainer(Hosted, ForwardingTrainer):
    """A trainer in a child process. Its `writing` calls back into this process."""

    def __init__(self, child: Child, others: Sequence[Child] = ()) -> None:
        """`others`: its processes on the other machines that it spans."""
        super().__init__(child)
        self._others = others
        self._writing: Writing | None = None
        self._entered: AbstractAsyncContextManager[None] | None = None
        child.peer.handlers.update({"enter_writing": self._enter, "leave_writing": self._leave})

    async def step(self, batch: Batch, writing: Writing) -> Metrics:
        self._writing = writing
        return await self.forward(Trainer.step, batch)

    async def close(self) -> None:
        await super().close()
        await asyncio.gather(*(other.close() for other in self._others))

    async def _enter(self) -> None:
        assert self._writing is not None, "a trainer writes only during its step"
        self._entered = self._writing()
        await self._entered.__aenter__()

    async def _leave(self, failure: str | None) -> None:
        entered, self._entered = self._entered, None
        assert entered is not None, "a trainer leaves only what it entered"
        if failure is None:
            await entered.__aexit__(None, None, None)
        else:
            error = RemoteError(f"{self.child.role} failed while it was writing weights: {failure}")
            await entered.__aexit__(type(error), error, None)


class HostedAdapterEngine(HostedEngine, ForwardingAdapters):
    """An engine in a child process that also samples from named adapters. If it cannot, its calls raise NotImplementedError."""


class HostedStepwiseTrainer(HostedTrainer, ForwardingStepwise):
    """A trainer in a child process that also trains named adapters. If it cannot, its calls raise NotImplementedError."""


class HostedReward(Reward):
    """A reward in a child process, which is replaced if it hangs or ends: only the call in progress fails."""

    queues = True

    def __init__(self, start: Callable[[], Awaitable[Child]], deadline_s: float, named: str = "") -> None:
        """`named`: its name in an error of `open`; empty: the process's role."""

        async def start_and_open() -> Child:
            child = await start()
            try:
                await child.peer.call("open", named or child.role, deadline_s=OPEN_DEADLINE_S)
            except BaseException:
                await child.kill()
                raise
            return child

        self._process = ReplaceableChild(start_and_open)
        self._deadline_s = deadline_s
        self._metrics: Metrics = {}

    async def open(self) -> None:
        """Start the process unless it runs, and open the reward in it; a new process opens it again. Raises what building or opening
        raises."""
        await self._process.open()

    async def __call__(self, task: Task, episodes: Sequence[Episode]) -> Floats | Sequence[float | Score]:
        rewards: Floats
        turns: list[Placed | None] | None
        reported: ReportedMetrics | None
        try:
            rewards, turns, reported, self._metrics = await self._process.call(
                "reward", task, list(episodes), deadline_s=self._deadline_s
            )
        except ProcessDied as error:  # only this call fails; a run whose rewards keep failing ends by that
            raise RemoteError(Exception.__str__(error), remedy=error.remedy) from error
        if turns is None and reported is None:
            return rewards
        of_each = zip(rewards, turns or [None] * len(rewards), reported or [{}] * len(rewards), strict=True)
        return [Score(value, turns=of, metrics=own) if of or own else value for value, of, own in of_each]

    def metrics(self) -> Metrics:
        """Return the metrics that the reward in the child reported after its last call."""
        return self._metrics

    async def close(self) -> None:
        await self._process.close()

"""Sources of trajectories: the interface of all, and the one that runs rollouts in this process."""

from __future__ import annotations

import asyncio
import contextlib
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from atropos_adapter_skyrl.engine import SkyRLEngine, sampling_of
from atropos_adapter_skyrl.rows import TrainingRow, rows_of
from atropos_core import console
from atropos_core.errors import NoProgress
from atropos_core.guards.deadlines import within
from atropos_core.interfaces import Engine, Environment
from atropos_core.rollouts.runner import RolloutRunner
from atropos_core.rollouts.tokenizer import ChatTokenizer
from atropos_core.seeds import derive
from atropos_core.training.parts import CLOSE_DEADLINE_S, EvaluationParts
from atropos_core.types import Draw, Failed

OPEN_DEADLINE_S = 600.0  # of an environment, which may have to download a data set


class RolloutsFailed(NoProgress):
    """A group that SkyRL requested cannot be produced. generate() raises this and returns no filler rows."""


@dataclass(frozen=True)
class GroupRequest:
    """One group that a generate() waits for: its draw, with a new id, and its number of rollouts."""

    draw: Draw
    n: int
    training: bool


@dataclass(frozen=True)
class GroupResult:
    """A group's trajectories [n], each of one row or more, and the time that they took."""

    trajectories: list[list[TrainingRow]]
    seconds: float
    requeued: int = 0  # earlier rollouts, or groups, that failed or were late


class GroupSource(ABC):
    """A source of the requested groups. Any number of calls at a time."""

    version = 0  # of the policy: the number of training steps in the weights

    @abstractmethod
    async def fetch(
        self, requests: Sequence[GroupRequest], params: Mapping[str, Any], *, step_wise: bool
    ) -> list[GroupResult]:
        """Results in the order of `requests`. Raises RolloutsFailed, DataError, and the error of an engine or the API."""

    async def open(self) -> None:
        """Called once, in the event loop of the training."""

    async def set_version(self, version: int) -> None:
        """Called when the engines begin to sample from the weights of this version."""
        self.version = version

    async def announce(self, version: int) -> None:
        """Called before the engines sample from the weights of this version."""

    def step_ended(self, saved: bool, draws: Collection[int] | None = None) -> bool:
        """Called when a training step has ended. With `saved`, a checkpoint holds this step and all earlier ones.

        `draws` are the ids of the groups that the step took; None means all groups fetched for training. Returns True if the
        source wants a checkpoint now."""
        return False

    async def close(self) -> None:
        """Release everything; may be called twice."""


async def all_or_none(each: Sequence[Any]) -> list[GroupResult]:
    """Return the results of these coroutines. The first error cancels the others and is raised."""
    if len(each) == 1:
        return [await each[0]]
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one) for one in each]
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return [task.result() for task in tasks]


def failed(request: GroupRequest, cause: Failed | str, attempts: int) -> RolloutsFailed:
    draw = request.draw
    reason = cause if isinstance(cause, str) else f"{cause.where}: {cause.cause}"
    return RolloutsFailed(
        f"task {draw.index} ({draw.split}) of environment {draw.environment!r} failed {attempts} times; the last time "
        f"in {reason}" + ("" if isinstance(cause, str) or not cause.trace else f"\n{cause.trace.rstrip()}")
    )


class Here(GroupSource):
    """Atropos environments in SkyRL's own process, with SkyRL's engines."""

    def __init__(
        self, build: Callable[[Engine], Awaitable[EvaluationParts]], client: Any, tokenizer: ChatTokenizer, *,
        deadline_s: float, attempts: int, model: str | None = None, salted: bool = False,
    ) -> None:  # fmt: skip
        """`build`: environments and rewards for this engine, open."""
        self._build = build
        self._parts: EvaluationParts | None = None
        self._client = client
        self._tokenizer = tokenizer
        self._deadline_s = deadline_s
        self._attempts = attempts
        self._model = model
        self._salted = salted

    async def open(self) -> None:
        self._parts = await self._build(self._engine({}))

    async def fetch(
        self, requests: Sequence[GroupRequest], params: Mapping[str, Any], *, step_wise: bool
    ) -> list[GroupResult]:
        assert self._parts is not None, "open() comes first"
        environments, rewards, sampling = self._parts.environments, self._parts.rewards, sampling_of(params)

        async def run_group(one: GroupRequest) -> GroupResult:
            began, failures = time.monotonic(), 0
            engine = self._engine(params)
            rollout_runner = RolloutRunner(
                environments, rewards, engine, self._tokenizer, deadline_s=self._deadline_s, deterministic=False
            )
            try:
                for attempt in range(self._attempts):
                    draw = replace(one.draw, seed=derive(one.draw.seed, attempt)) if attempt else one.draw
                    keys = rollout_runner.schedule_keys(draw, one.n)
                    group = await rollout_runner.run(draw, keys, one.n, sampling, attempts=self._attempts)
                    failures += len(group.failed)
                    if len(group.episodes) == one.n:
                        return GroupResult(rows_of(group, step_wise=step_wise), time.monotonic() - began, failures)
                    if group.failed[-1].where != "reward":  # a rollout, which has had all its attempts
                        break
            finally:
                await engine.finish()
            raise failed(one, group.failed[-1], self._attempts)

        return await all_or_none([run_group(one) for one in requests])

    def _engine(self, params: Mapping[str, Any]) -> SkyRLEngine:
        return SkyRLEngine(
            self._client, params, lambda: self.version, self._model, f"{self.version}" if self._salted else None
        )

    async def close(self) -> None:
        """Close everything. Errors are only reported: they do not change the training."""
        parts, self._parts = self._parts, None
        if parts is not None:
            try:
                await parts.close()
            except Exception as error:  # noqa: BLE001 - the plugin boundary: an environment's code
                console.warn(f"while ending the training: {type(error).__name__}: {error}")


async def open_all(environments: Mapping[str, Environment]) -> None:
    """Open all of them. Raises the first error, or DeadlineExceeded that names the environment."""
    await asyncio.gather(
        *(
            within(environment.open(), OPEN_DEADLINE_S, f"environment {name!r}: open()")
            for name, environment in environments.items()
        )
    )


async def close_all(environments: Mapping[str, Environment]) -> None:
    """Close all of them, and report errors instead of raising."""
    closing = [within(environment.close(), CLOSE_DEADLINE_S, "close()") for environment in environments.values()]
    ended = await asyncio.gather(*closing, return_exceptions=True)
    for name, error in zip(environments, ended, strict=True):
        if isinstance(error, Exception):
            console.warn(f"environment {name!r} does not close: {type(error).__name__}: {error}")


@contextlib.asynccontextmanager
async def opened(source: GroupSource) -> AsyncIterator[GroupSource]:
    """Open it for the block and close it afterwards, even if opening fails."""
    try:
        await source.open()
        yield source
    except BaseException:
        try:
            await source.close()
        except Exception as error:  # noqa: BLE001 - the error that ended the training says more
            console.warn(f"while ending the training: {type(error).__name__}: {error}")
        raise
    await source.close()

"""Episodes for programs that the user starts: a program that asks for one gets the oldest episode of the queue, and reports its end.

A rollout begins only when a program is waiting to take it, so waiting costs nothing of its deadline. Each program that asks admits
one rollout; the episode that the rollout puts into the queue goes to the program that has waited longest.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from types import TracebackType
from typing import Any

from atropos_agent_api.calls import CallRefused
from atropos_core import console
from atropos_core.errors import DeadlineExceeded, SandboxError
from atropos_core.sandboxes import Exit, Limit, Limits

MOST_ENDED = 10_000  # episodes whose late reports are answered with the reason why they ended
SAY_AFTER_S = 60.0  # warn after this time without a program that takes an episode


@dataclass(frozen=True)
class Report:
    """A program's report of an episode's end."""

    exit_code: int = 0
    output: bytes = b""
    errors: bytes = b""
    files: Mapping[PurePosixPath, bytes] = field(default_factory=dict)  # in its work directory

    def limit(self, limits: Limits) -> Limit | None:
        """The limit that the report exceeds. The part within the limit is kept."""
        if len(self.output) + len(self.errors) > limits.output_bytes:
            return "output"
        return "disk" if sum(map(len, self.files.values())) > limits.disk_bytes else None


@dataclass(eq=False)
class QueuedEpisode:
    """One episode. `content` is the JSON that the program gets; addresses in it begin with `url`."""

    id: str
    content: Mapping[str, Any]
    url: str
    limits: Limits
    taken_at: float | None = None
    ended: asyncio.Future[Exit] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    report: Report | None = None
    timer: asyncio.TimerHandle | None = None

    def end(self, *, code: int | None = None, limit: Limit | None = None, stopped: bool = False) -> None:
        """May be called twice."""
        if self.timer is not None:
            self.timer.cancel()
        if not self.ended.done():
            now = asyncio.get_running_loop().time()
            seconds = 0.0 if self.taken_at is None else now - self.taken_at
            self.ended.set_result(Exit(code, None, limit, stopped, None, seconds))


@dataclass(eq=False)
class _Taker:
    """One open request for an episode."""

    got: asyncio.Future[QueuedEpisode | None]  # None: there will be none
    has_admitted: bool = False


class EpisodeQueue:
    """Used on one event loop. `patience_s`: how long episodes wait for a program to ask."""

    def __init__(self, patience_s: float) -> None:
        self.is_closed = False
        self._patience_s = patience_s
        self._waiting: deque[QueuedEpisode] = deque()
        self._taken: dict[str, QueuedEpisode] = {}
        self._ended: dict[str, str] = {}  # id: why
        self._takers: deque[_Taker] = deque()
        self._rollouts: deque[asyncio.Future[None]] = deque()  # waiting to be admitted
        self._seen_at = 0.0  # when a program last waited or worked
        self._said_at = 0.0

    # -- takers

    async def next(self, wait_s: float, gone: asyncio.Future[Any]) -> QueuedEpisode | None:
        """The next episode. None if there is none within `wait_s`, or the program has `gone` in the meantime."""
        taker = _Taker(asyncio.get_running_loop().create_future())
        self._seen()
        self._takers.append(taker)
        self._match()
        try:
            await asyncio.wait({taker.got, gone}, timeout=wait_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._seen()
            if not taker.got.done():
                self._takers.remove(taker)
                taker.got.cancel()
        return None if taker.got.cancelled() else taker.got.result()

    def give_back(self, queued: QueuedEpisode) -> None:
        """Put an episode first in the queue again, because its program went before any of it was sent."""
        if self._taken.pop(queued.id, None) is not None:
            assert queued.timer is not None, "it was taken"
            queued.timer.cancel()
            queued.taken_at = queued.timer = None
            self._waiting.appendleft(queued)
            self._match()

    def taken(self, id: str) -> QueuedEpisode:
        """The episode, if it was taken and has not ended. Raises CallRefused."""
        if (queued := self._taken.get(id)) is not None:
            return queued
        if id in self._ended:
            raise CallRefused(
                f"this episode has ended: {self._ended[id]}. Take another one: POST /episodes/next.",
                status=409,
                code="episode_ended",
            )
        raise CallRefused(
            "this episode does not exist. Use the id that POST /episodes/next answered.",
            status=404,
            code="no_such_episode",
        )

    def reported(self, queued: QueuedEpisode, report: Report) -> Limit | None:
        """Record the end that the program reports. Returns the limit that the report exceeds."""
        self._seen()
        queued.report, limit = report, report.limit(queued.limits)
        self._forget(queued, "its end was reported")
        queued.end(code=report.exit_code, limit=limit)
        return limit

    # -- rollouts

    def slot(self, at_once: int) -> AbstractAsyncContextManager[object]:
        """Room for `at_once` running rollouts. Each rollout begins when a program is waiting for it."""
        return _Room(self, asyncio.Semaphore(at_once))

    async def taker(self) -> None:
        """Wait until a program can take one more episode. Raises DeadlineExceeded."""
        admitted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._seen_at = self._seen_at or asyncio.get_running_loop().time()
        self._rollouts.append(admitted)
        self._match()
        try:
            await self._patiently(admitted)
        finally:
            if not admitted.done():
                self._rollouts.remove(admitted)

    async def end_of(self, queued: QueuedEpisode) -> Exit:
        """Put the episode into the queue, and wait for its end. Raises DeadlineExceeded if no program takes it, SandboxError if there
        will be no more episodes."""
        if queued.taken_at is None and queued not in self._waiting and not queued.ended.done():
            self._waiting.append(queued)
            self._match()
        await self._patiently(queued.ended)
        if self.is_closed and queued.report is None:
            raise SandboxError("the run has ended, and its episodes with it.")
        return queued.ended.result()

    def withdraw(self, queued: QueuedEpisode) -> None:
        """End the episode, whatever its program reports later. May be called twice."""
        if queued in self._waiting:
            self._waiting.remove(queued)
        self._forget(queued, "its run has ended it")
        queued.end(stopped=True)

    def close(self) -> None:
        """Give out no more episodes. Waiting programs learn it now, others when they ask. May be called twice."""
        self.is_closed = True
        for taker in self._takers:
            if not taker.got.done():
                taker.got.set_result(None)
        self._takers.clear()
        for queued in [*self._waiting, *self._taken.values()]:
            self.withdraw(queued)

    # -- inside

    def _match(self) -> None:
        while self._waiting and self._takers:
            self._take(self._waiting.popleft(), self._takers.popleft())
        for taker in self._takers:
            if not taker.has_admitted and self._rollouts:
                taker.has_admitted = True
                self._rollouts.popleft().set_result(None)

    def _take(self, queued: QueuedEpisode, taker: _Taker) -> None:
        loop = asyncio.get_running_loop()
        queued.taken_at = loop.time()
        queued.timer = loop.call_later(queued.limits.wall_time_s, self._late, queued)
        self._taken[queued.id] = queued
        taker.got.set_result(queued)

    def _late(self, queued: QueuedEpisode) -> None:
        self._forget(queued, f"its end was not reported within its wall time of {queued.limits.wall_time_s:g} s")
        queued.end(limit="wall_time")

    def _forget(self, queued: QueuedEpisode, why: str) -> None:
        if self._taken.pop(queued.id, None) is not None:
            self._ended[queued.id] = why
            while len(self._ended) > MOST_ENDED:
                del self._ended[next(iter(self._ended))]

    def _seen(self) -> None:
        self._seen_at = asyncio.get_running_loop().time()

    async def _patiently(self, what: asyncio.Future[Any]) -> None:
        """Wait for `what`, as long as programs ask for episodes. Warns if none does, and raises when the patience is over."""
        loop = asyncio.get_running_loop()
        while not what.done():
            if self._taken or self._takers:
                self._seen()
            quiet_s = loop.time() - self._seen_at
            if quiet_s >= self._patience_s:
                raise DeadlineExceeded(
                    f"no program has asked for an episode for {self._patience_s:g} s.",
                    remedy="Start one that calls POST /episodes/next, or wait longer: sandbox.patience_s.",
                )
            if quiet_s >= SAY_AFTER_S and loop.time() - self._said_at >= SAY_AFTER_S:
                self._said_at = loop.time()
                console.warn(f"episodes are waiting, but no program has asked for one for {quiet_s:.0f} s.")
            await asyncio.wait({what}, timeout=min(SAY_AFTER_S, self._patience_s - quiet_s))


class _Room(AbstractAsyncContextManager[object]):
    """Like a semaphore, used by any number of rollouts at once."""

    def __init__(self, queue: EpisodeQueue, slots: asyncio.Semaphore) -> None:
        self._queue = queue
        self._slots = slots

    async def __aenter__(self) -> object:
        await self._slots.acquire()
        try:
            await self._queue.taker()
        except BaseException:
            self._slots.release()
            raise
        return None

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._slots.release()

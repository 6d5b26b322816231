"""The requests to one adapter: those that wait, and the batch of those that run.

Each adapter has its batch, and so has the model without one. Batches take turns, so what runs in one changes no result of
another.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from atropos_core.errors import DataError
from atropos_core.types import Completion
from atropos_engine_hf.batch import RunningBatch, SequenceState

POLICY = ""  # the name of the adapter that a bridge loads; no other has it


@dataclass(eq=False)
class Call:
    """One request for continuations that waits for its rows."""

    queue: RequestQueue
    done: list[Completion | None]
    missing: int
    future: asyncio.Future[None]


class RequestQueue:
    """The requests to one adapter. `calls` have rows that wait or run."""

    def __init__(self, adapter: str | None, batch: RunningBatch) -> None:
        """`adapter`: its name; None: the model without one."""
        self.adapter = adapter
        self.batch = batch
        self.waiting: deque[SequenceState] = deque()
        self.calls: set[Call] = set()
        self._users = 0  # requests of any kind
        self._unused = asyncio.Event()
        self._unused.set()
        self._is_ending = False

    @property
    def is_busy(self) -> bool:
        return bool(self.waiting or self.batch.rows)

    @contextmanager
    def used(self) -> Iterator[None]:
        """Keep the adapter inside. Raises DataError if it is being removed."""
        if self._is_ending:
            raise DataError(f"engine 'hf' is removing the adapter {self.adapter!r}: it takes no new requests.")
        self._users += 1
        self._unused.clear()
        try:
            yield
        finally:
            self._users -= 1
            if not self._users:
                self._unused.set()

    async def end(self) -> None:
        """Refuse new requests, and return when those in flight have ended. Each has its deadline."""
        self._is_ending = True
        await self._unused.wait()

    def drop(self, call: Call) -> None:
        """Forget a call that is answered, failed, late or cancelled."""
        self.calls.discard(call)
        if call.missing:
            self.waiting = deque(row for row in self.waiting if row.owner is not call)
            self.batch.remove(call)

    def fail(self, error: Exception) -> None:
        """Drop all rows, and let their callers know why."""
        self.waiting.clear()
        self.batch.clear()
        for call in self.calls:
            if not call.future.done():
                call.future.set_exception(error)

    def evict(self) -> None:
        """Let the running rows wait again, with their tokens so far, before the others."""
        self.waiting.extendleft(reversed(self.batch.evict()))


class KeysAndValues:
    """Shares the memory for keys and values among batches: all of them together take at most what one may."""

    def __init__(self) -> None:
        self._first: RequestQueue | None = None  # the one that the others admit nothing before

    def room(self, queue: RequestQueue, others: list[RequestQueue]) -> int:
        """Return how many waiting rows of a queue may enter now.

        If none fits while rows of others run, nothing else enters before these have made room."""
        if self._first is not None and not self._first.waiting:
            self._first = None
        if not queue.waiting or self._first not in (None, queue):
            return 0
        room = queue.batch.take(queue.waiting, _bytes_of_batches(others))
        if not room and not queue.batch.rows:
            for other in others:
                if not other.batch.rows:
                    other.batch.release()
            room = queue.batch.take(queue.waiting, _bytes_of_batches(others))
            self._first = None if room else queue
        elif room:
            self._first = None
        return room


def _bytes_of_batches(queues: list[RequestQueue]) -> int:
    return sum(queue.batch.size_bytes for queue in queues)

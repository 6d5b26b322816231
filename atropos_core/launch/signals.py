"""End a run before its last step: at a signal, a request from another thread, or the end of one of its processes."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from types import FrameType
from typing import Any, TypeVar

from atropos_core import console
from atropos_core.console.waits import waited_for
from atropos_core.errors import Interrupted, ProcessDied
from atropos_core.guards.blocked_loop import in_main_thread, loop_alarm
from atropos_core.launchers import RunWorkers
from atropos_core.processes.child import Child

T = TypeVar("T")

TWICE_S = 0.5  # between two requests to end that are two


async def interruptible(stop: asyncio.Event, work: Coroutine[Any, Any, T]) -> T:
    """Await `work`, a part of start-up, unless the user stops the run first. Then raises Interrupted, which names what was
    waited for."""
    task = asyncio.ensure_future(work)
    stopping = asyncio.ensure_future(stop.wait())
    await asyncio.wait({task, stopping}, return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    if not task.done():
        waits = "; ".join(waited_for())
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        raise Interrupted("stopped before the first step" + (f", waiting for {waits}" if waits else ""))
    return task.result()


async def watched(work: Coroutine[Any, Any, T], children: Sequence[Child], workers: RunWorkers | None = None) -> T:
    """Await `work`. Raises the error of a child that ends, even between requests, or of `workers`."""
    task = asyncio.ensure_future(work)
    watches = [asyncio.ensure_future(child.peer.lost.wait()) for child in children]
    broken = {workers.broken} if workers is not None else set()
    try:
        await asyncio.wait({task, *watches, *broken}, return_when=asyncio.FIRST_COMPLETED)
        for failed in broken:
            if failed.done():
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
                failed.result()
        for child in children:
            if child.peer.lost.is_set():
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
                raise child.peer.error or ProcessDied(f"{child.role} has gone away")
        return await task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        for watch in watches:
            watch.cancel()


@contextmanager
def signals(stop: asyncio.Event, began: asyncio.Event) -> Iterator[None]:
    """The first Ctrl-C, SIGTERM or SIGHUP asks the run to save and end. The second ends it at once; so does the first if the run
    has not `began`."""
    current = asyncio.current_task()
    assert current is not None, "called from a coroutine"

    def end_requested() -> None:
        if stop.is_set():
            current.cancel()
        else:
            how = (
                "finishing what has begun and saving (once more ends it at once)"
                if began.is_set()
                else "no step has begun"
            )
            console.say(f"\nstopping: {how}")
            stop.set()

    with requests_to_end(end_requested, cancels_at=2):
        yield


class EndRequests:
    """Requests to end work outside the main thread, where signals do not arrive. A request that comes before anything listens is
    kept."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._deliver: Callable[[], object] | None = None
        self._kept = 0

    def request(self) -> None:
        """Request the end. May be called from any thread."""
        with self._lock:
            if self._deliver is None:
                self._kept += 1
            else:
                self._deliver()

    @contextmanager
    def listening(self, arrived: Callable[[], object]) -> Iterator[None]:
        """Call `arrived` on the running loop for each request."""
        loop = asyncio.get_running_loop()
        with self._lock:
            self._deliver = lambda: loop.call_soon_threadsafe(arrived)
            kept, self._kept = self._kept, 0
        for _ in range(kept):
            arrived()
        try:
            yield
        finally:
            with self._lock:
                self._deliver = None


FROM_OUTSIDE: ContextVar[EndRequests | None] = ContextVar("requests_to_end", default=None)  # of a thread's work


@contextmanager
def cancelled_by_signals() -> Iterator[None]:
    """Cancel the current task at each request to end."""
    task = asyncio.current_task()
    assert task is not None, "called from a coroutine"
    with requests_to_end(task.cancel, cancels_at=1):
        yield


@contextmanager
def requests_to_end(requested: Callable[[], object], *, cancels_at: int) -> Iterator[None]:
    """Call `requested` for each Ctrl-C, SIGTERM and SIGHUP. Two within TWICE_S count as one: a shell, `timeout` or a service
    manager sends the same signal to a process and to its group. An ignored SIGHUP (`nohup`) stays ignored. Outside the main
    thread, where signals do not arrive, `requested` is called for each request of FROM_OUTSIDE.

    `cancels_at`: the number of the request at which `requested` cancels the current task. From then on, CancelledError is
    raised inside code that blocks the event loop for END_AFTER_S, and the task is cancelled from there. Raises CancelledError
    in place of an error that this causes."""
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None, "called from a coroutine"
    last, waiting, heard = -TWICE_S, 0, 0

    def count() -> None:
        nonlocal last, waiting
        before, last = last, loop.time()
        if last - before >= TWICE_S:
            waiting += 1

    def deliver() -> None:
        nonlocal waiting, heard
        while waiting:
            waiting, heard = waiting - 1, heard + 1
            requested()

    if not in_main_thread():

        def arrived() -> None:
            count()
            deliver()

        outside = FROM_OUTSIDE.get()
        with outside.listening(arrived) if outside is not None else nullcontext():
            yield
        return
    numbers = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        numbers.append(signal.SIGHUP)
    hurried = interrupted = False
    pid = os.getpid()

    def signalled(number: int, frame: FrameType | None) -> None:
        """Called even if code blocks the loop, which calls `deliver` when it is free."""
        nonlocal hurried
        if os.getpid() != pid:  # a component forked it
            return
        count()
        if heard + waiting >= cancels_at and not hurried:
            hurried = True
            alarm.hurry(cancel)

    def cancel() -> None:
        nonlocal waiting, heard, interrupted
        interrupted = True
        if waiting:
            waiting, heard = 0, heard + waiting
            if task is not asyncio.current_task():  # which is about to raise CancelledError
                task.cancel()

    def free() -> None:
        if hurried:
            alarm.restart()
        deliver()

    for number in numbers:
        loop.add_signal_handler(number, free)
        signal.signal(number, signalled)  # instead of one that does nothing
    try:
        with loop_alarm() as alarm:
            yield
    except Exception:
        if interrupted:  # component code, which may have made any error of it
            raise asyncio.CancelledError from None
        raise
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)

"""What surrounds a run's work: signals, children that go away, code that blocks the event loop."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

from atropos_core import console
from atropos_core.errors import EventLoopBlocked, Interrupted, ProcessDied
from atropos_core.hosting import Child

T = TypeVar("T")

BLOCKED_AFTER_S = float(os.environ.get("ATROPOS_BLOCKED_AFTER_S", "30"))  # of the event loop


async def interruptible(stop: asyncio.Event, work: Coroutine[Any, Any, T]) -> T:
    """`work`, unless the user stops the run first."""
    task = asyncio.ensure_future(work)
    stopping = asyncio.ensure_future(stop.wait())
    await asyncio.wait({task, stopping}, return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    if not task.done():
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        raise Interrupted("stopped before the first step")
    return task.result()


async def watched(work: Coroutine[Any, Any, None], children: Sequence[Child]) -> None:
    """`work`, which ends with the error of a child that goes away, also while nothing is asked of that child."""
    task = asyncio.ensure_future(work)
    watches = [asyncio.ensure_future(child.peer.lost.wait()) for child in children]
    try:
        await asyncio.wait({task, *watches}, return_when=asyncio.FIRST_COMPLETED)
        for child in children:
            if child.peer.lost.is_set():
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
                raise child.peer.error or ProcessDied(f"{child.role} has gone away")
        await task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        for watch in watches:
            watch.cancel()


@contextmanager
def signals(stop: asyncio.Event) -> Iterator[None]:
    """The first Ctrl-C or SIGTERM asks the run to save and end; the second ends it at once."""
    loop = asyncio.get_running_loop()
    current = asyncio.current_task()
    assert current is not None, "called from a coroutine"

    def asked() -> None:
        if stop.is_set():
            current.cancel()
        else:
            console.say("\nstopping: finishing this step and saving (once more ends it at once)")
            stop.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, asked)
    try:
        yield
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)


@contextmanager
def blocked_loop_alarm() -> Iterator[None]:
    """Interrupt code that keeps the event loop from running, by an exception raised inside that code: an environment
    that never awaits fails its own rollout, and not the run."""

    def blocked(number: int, frame: FrameType | None) -> None:
        signal.setitimer(signal.ITIMER_REAL, BLOCKED_AFTER_S)
        where = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} in {frame.f_code.co_name}()" if frame else "?"
        raise EventLoopBlocked(
            f"{where} held the event loop for {BLOCKED_AFTER_S:g} s. Code of an environment must await whatever takes long "
            "(asyncio.to_thread for computations)."
        )

    async def beat() -> None:
        while True:
            signal.setitimer(signal.ITIMER_REAL, BLOCKED_AFTER_S)
            await asyncio.sleep(BLOCKED_AFTER_S / 4)

    beating = asyncio.ensure_future(beat())
    before: Callable[[int, FrameType | None], object] | int | None = signal.signal(signal.SIGALRM, blocked)
    try:
        yield
    finally:
        beating.cancel()
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)

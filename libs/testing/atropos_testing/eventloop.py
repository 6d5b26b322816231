"""Run a contract check on its own event loop, and detect code that blocks it.

A signal, not a thread, interrupts blocking code: a regular expression that backtracks for ever keeps Python's lock from other
threads, but does check for signals.
"""

from __future__ import annotations

import asyncio
import ctypes
import inspect
import signal
import sysconfig
import threading
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter, thread_time
from types import FrameType
from typing import Any, TypeVar

from atropos_core.errors import ConfigError
from atropos_core.guards.exits import own_process
from atropos_testing.report import Report
from atropos_testing.waits import Waits

T = TypeVar("T")

EVENT_LOOP = "event loop"  # the check's name
BLOCKED_AFTER_S = 2.0  # a rollout that blocks the loop this long is interrupted, and fails
NOTED_AFTER_S = 0.5
_BEAT_S = 0.1
_END_S = 2.0
_LIBRARY = sysconfig.get_paths()["stdlib"]


class Blocked(BaseException):
    """Raised inside code that blocked the event loop. Not an Exception, so that a rollout cannot catch it by accident."""


class Watch:
    """Records how long the event loop was blocked, and by what."""

    def __init__(self) -> None:
        self.blocked: list[str] = []  # the lines that were interrupted
        self.waits = Waits(_where, lambda: self.active and not self._off)
        self.longest_s = 0.0  # of computing: on a busy machine the loop also waits for its turn
        self.active = False  # False outside the main thread, where no signal arrives
        self.came_round()
        self._off = False

    @contextmanager
    def off(self) -> Iterator[None]:
        """Do not count time inside the block, and do not interrupt it: for code that does not run during rollouts."""
        self._off = True
        try:
            yield
        finally:
            self._off = False
            self.came_round()

    def tell(self, report: Report, remedy: str) -> None:
        """Add the finding of this check to `report`."""
        if not self.active:
            report.note(EVENT_LOOP, "not watched: the check does not run in the main thread")
            return
        report.check(
            EVENT_LOOP,
            [
                *(f"{where} blocked it for {BLOCKED_AFTER_S:g} s" for where in dict.fromkeys(self.blocked)),
                *([] if self.blocked else self.waits.found()),
            ],
            good=f"computed without a pause for {self.longest_s:.2f} s at most",
            remedy=remedy,
        )
        if not self.blocked and self.longest_s > NOTED_AFTER_S:
            report.note(EVENT_LOOP, "no other rollout proceeds meanwhile: asyncio.to_thread is for long computations")

    def blocked_s(self) -> float:
        """Return how long the loop has been blocked, as far as it counts."""
        return 0.0 if self._off else perf_counter() - self._came_at

    def is_blocked(self) -> bool:
        """Called when the alarm rings. Code that got less than half of the time as CPU time was waiting on a busy machine."""
        waited, computed = self.blocked_s(), self.computed_s()
        has_no_turn = _BEAT_S < computed < BLOCKED_AFTER_S / 2 and waited < 5 * BLOCKED_AFTER_S
        return waited >= BLOCKED_AFTER_S / 2 and not has_no_turn

    def came_round(self) -> None:
        self._came_at, self._cpu_at = perf_counter(), thread_time()

    def computed_s(self) -> float:
        """Return how much of `blocked_s` the loop's thread spent computing."""
        return 0.0 if self._off else thread_time() - self._cpu_at


def run(main: Coroutine[Any, Any, T]) -> T:
    """Return the result of `main`, run on a new loop. Tasks that it leaves are cancelled, after a short wait. Calls that would end the
    process raise SystemExit, which is an error of the code that made them; Ctrl-C cancels `main`."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        pass
    else:
        main.close()
        raise ConfigError(
            "a contract check runs its own event loop and cannot start inside another.",
            remedy="Call it from an ordinary test function (def, not async def).",
        )
    loop = asyncio.new_event_loop()
    loop.set_exception_handler(lambda *_: None)  # errors of abandoned rollouts: each has its finding
    checking = loop.create_task(_in_own_process(main))
    is_main = threading.current_thread() is threading.main_thread()
    if is_main:
        loop.add_signal_handler(signal.SIGINT, checking.cancel)
    try:
        return loop.run_until_complete(checking)
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None
    finally:
        if is_main:
            loop.remove_signal_handler(signal.SIGINT)
        left = asyncio.all_tasks(loop)
        for task in left:
            task.cancel()
        if left:
            loop.run_until_complete(asyncio.wait(left, timeout=_END_S))
        for task in left:
            if not task.done():
                # Freeing it would throw GeneratorExit into a coroutine that catches everything, and never return.
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(task))
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.close()


async def _in_own_process(main: Coroutine[Any, Any, T]) -> T:
    with own_process(passing=(Blocked,)):
        return await main


@contextmanager
def watched() -> Iterator[Watch]:
    """Interrupt code that blocks the running loop for BLOCKED_AFTER_S, by raising `Blocked` inside it. A timer that was set before
    (pytest-timeout's) is set again afterwards."""
    loop = asyncio.get_running_loop()
    watch = Watch()
    watch.active = threading.current_thread() is threading.main_thread()
    handle: asyncio.TimerHandle

    def on_alarm(number: int, frame: FrameType | None) -> None:
        signal.setitimer(signal.ITIMER_REAL, BLOCKED_AFTER_S)
        if asyncio.current_task(loop) is not None and watch.is_blocked():
            where = _where(frame)
            watch.blocked.append(where)
            raise Blocked(f"{where} blocked the event loop for {BLOCKED_AFTER_S:g} s")

    def beat() -> None:
        nonlocal handle
        watch.longest_s = max(watch.longest_s, watch.computed_s())
        watch.came_round()
        if watch.active:
            signal.setitimer(signal.ITIMER_REAL, BLOCKED_AFTER_S)
        handle = loop.call_later(_BEAT_S, beat)

    started = perf_counter()
    if watch.active:
        handler = signal.signal(signal.SIGALRM, on_alarm)
        remaining, interval = signal.setitimer(signal.ITIMER_REAL, BLOCKED_AFTER_S)
    handle = loop.call_later(_BEAT_S, beat)
    watch.waits.begin()
    try:
        yield watch
    finally:
        watch.waits.end()
        handle.cancel()
        if watch.active:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, handler)
            if remaining:
                signal.setitimer(signal.ITIMER_REAL, max(remaining - (perf_counter() - started), 0.01), interval)


def _where(frame: FrameType | None) -> str:
    """Return the innermost line outside the standard library."""
    outermost = frame
    while outermost is not None and outermost.f_code.co_filename.startswith((_LIBRARY, "<frozen")):
        outermost = outermost.f_back
    outermost = outermost or frame
    if outermost is None:
        return "something"
    return f"{Path(inspect.getfile(outermost)).name}:{outermost.f_lineno} in {outermost.f_code.co_name}()"

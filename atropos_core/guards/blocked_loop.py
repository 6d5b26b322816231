"""An alarm for code that blocks the event loop."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from types import FrameType
from typing import Any

from atropos_core import console
from atropos_core.errors import EventLoopBlocked

BLOCKED_AFTER_S = float(os.environ.get("ATROPOS_BLOCKED_AFTER_S", "30"))
END_AFTER_S = 3.0  # that code may block the loop once everything is to end
NEXT_AFTER_S = 0.1  # and other code after it, before the loop comes round
WATCHED = (signal.SIGALRM, signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # signals whose handlers are restored


def in_main_thread() -> bool:
    """True if signals arrive in this thread."""
    return threading.current_thread() is threading.main_thread()


class LoopAlarm:
    """Raises EventLoopBlocked inside code that blocks an event loop for longer than the smallest of its bounds.

    After the process was stopped, the alarm goes off at once although nothing blocked, so only a second one counts. If a
    component replaces the handler of a watched signal, it is restored. Only works in the main thread."""

    def __init__(self) -> None:
        self._bounds: list[float] = []
        self._rang = self._hurried = False
        self._when_late: Callable[[], object] = lambda: None
        self._beating: asyncio.Task[None] | None = None
        self._ours: dict[int, Any] = {}

    @contextmanager
    def installed(self) -> Iterator[LoopAlarm]:
        """Own SIGALRM inside the block. Without a bound, nothing is interrupted."""
        self._loop = asyncio.get_running_loop()
        before: Any = signal.signal(signal.SIGALRM, self._ring)
        self._ours = {number: signal.getsignal(number) for number in WATCHED}
        outer = _ALARM.set(self)
        try:
            yield self
        finally:
            _ALARM.reset(outer)
            self._bounds.clear()
            self.restart()
            self._put_back()
            signal.signal(signal.SIGALRM, before)

    @contextmanager
    def bounded(self, bound_s: float) -> Iterator[None]:
        """Interrupt code inside the block that blocks the loop for `bound_s`."""
        self._bounds.append(bound_s)
        self.restart()
        try:
            yield
        finally:
            if bound_s in self._bounds:
                self._bounds.remove(bound_s)
            self.restart()

    def hurry(self, when_late: Callable[[], object]) -> None:
        """From now on, call `when_late` if a task blocks the loop for END_AFTER_S, and raise CancelledError inside it. May be called
        from a signal handler: no task is made here."""
        self._when_late = when_late
        self._hurried = True
        self._bounds.append(END_AFTER_S)
        self._begin()

    def restart(self) -> None:
        """Measure from now on. Called on the loop, after the bounds changed."""
        if self._beating is not None:
            self._beating.cancel()
        self._begin()
        self._beating = asyncio.ensure_future(self._beat()) if self._bounds else None

    async def _beat(self) -> None:
        while True:
            self._put_back()
            self._begin()
            await asyncio.sleep(min(self._bounds) / 4)

    def _begin(self) -> None:
        self._rang = False
        signal.setitimer(signal.ITIMER_REAL, 0.8 * min(self._bounds) if self._bounds else 0)

    def _ring(self, number: int, frame: FrameType | None) -> None:
        if not self._bounds:
            return
        bound_s = min(self._bounds)
        if not self._rang or _waits_for_events(frame):  # nothing keeps it: the machine has not let this process run
            self._rang = True
            signal.setitimer(signal.ITIMER_REAL, 0.2 * bound_s)
            return
        signal.setitimer(signal.ITIMER_REAL, NEXT_AFTER_S if self._hurried else bound_s)
        if self._hurried and asyncio.current_task(self._loop) is not None:
            self._loop.call_soon(self.restart)  # before the task that `when_late` cancels
            self._when_late()
            raise asyncio.CancelledError
        if self._hurried:  # between two tasks
            return
        where = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} in {frame.f_code.co_name}()" if frame else "?"
        raise EventLoopBlocked(
            f"{where} blocked the event loop for {bound_s:g} s. Code of a component must await whatever takes long "
            "(asyncio.to_thread for computations)."
        )

    def _put_back(self) -> None:
        for number, handler in self._ours.items():
            if signal.getsignal(number) is not handler:
                signal.signal(number, handler)
                console.warn(
                    f"a component replaced the run's handler for {signal.Signals(number).name}, which the run needs: "
                    "it has been restored."
                )


_ALARM: ContextVar[LoopAlarm | None] = ContextVar("loop_alarm", default=None)  # of the task that installed one


@contextmanager
def loop_alarm() -> Iterator[LoopAlarm]:
    """Install an alarm, or take the one that is installed around this block."""
    if (around := _ALARM.get()) is not None:
        yield around
        return
    with LoopAlarm().installed() as alarm:
        yield alarm


@contextmanager
def blocked_loop_alarm() -> Iterator[None]:
    """Interrupt code that blocks the event loop for BLOCKED_AFTER_S by raising an exception inside it, so that an environment that
    never awaits fails only its own rollout. Outside the main thread no signal arrives, and nothing is interrupted."""
    if not in_main_thread():
        yield
        return
    with loop_alarm() as alarm, alarm.bounded(BLOCKED_AFTER_S):
        yield


def _waits_for_events(frame: FrameType | None) -> bool:
    """True if the event loop itself was in `select`, and no component's code was running."""
    caller = frame.f_back if frame is not None else None
    return (
        caller is not None
        and caller.f_code.co_name == "_run_once"
        and caller.f_globals.get("__name__") == "asyncio.base_events"
    )

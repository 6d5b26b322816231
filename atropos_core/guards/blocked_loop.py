"""An alarm for code that blocks the event loop."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from atropos_core import console
from atropos_core.errors import EventLoopBlocked

BLOCKED_AFTER_S = float(os.environ.get("ATROPOS_BLOCKED_AFTER_S", "30"))


def in_main_thread() -> bool:
    """True if signals arrive in this thread."""
    return threading.current_thread() is threading.main_thread()


@contextmanager
def blocked_loop_alarm() -> Iterator[None]:
    """Interrupt code that blocks the event loop by raising an exception inside it, so that an environment that never awaits
    fails only its own rollout.

    After the process was stopped, the alarm goes off at once although nothing blocked, so only a second one counts. If a
    component replaces the handler, it is restored. Outside the main thread no signal arrives, and nothing is interrupted."""
    if not in_main_thread():
        yield
        return
    first_s, second_s = 0.8 * BLOCKED_AFTER_S, 0.2 * BLOCKED_AFTER_S
    rung = False

    def blocked(number: int, frame: FrameType | None) -> None:
        nonlocal rung
        if not rung:
            rung = True
            signal.setitimer(signal.ITIMER_REAL, second_s)
            return
        if _waits_for_events(frame):  # nothing keeps it: the machine has not let this process run
            signal.setitimer(signal.ITIMER_REAL, second_s)
            return
        signal.setitimer(signal.ITIMER_REAL, BLOCKED_AFTER_S)
        where = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} in {frame.f_code.co_name}()" if frame else "?"
        raise EventLoopBlocked(
            f"{where} blocked the event loop for {BLOCKED_AFTER_S:g} s. Code of an environment must await whatever takes long "
            "(asyncio.to_thread for computations)."
        )

    def put_back() -> None:
        for number, handler in ours.items():
            if signal.getsignal(number) is not handler:
                signal.signal(number, handler)
                console.warn(
                    f"a component replaced the run's handler for {signal.Signals(number).name}, which the run needs: "
                    "it has been restored."
                )

    async def beat() -> None:
        nonlocal rung
        while True:
            rung = False
            put_back()
            signal.setitimer(signal.ITIMER_REAL, first_s)
            await asyncio.sleep(BLOCKED_AFTER_S / 4)

    before: Callable[[int, FrameType | None], object] | int | None = signal.signal(signal.SIGALRM, blocked)
    watching = (signal.SIGALRM, signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    ours: dict[int, Any] = {number: signal.getsignal(number) for number in watching}
    beating = asyncio.ensure_future(beat())
    try:
        yield
    finally:
        beating.cancel()
        put_back()
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _waits_for_events(frame: FrameType | None) -> bool:
    """True if the event loop itself was in `select`, and no component's code was running."""
    caller = frame.f_back if frame is not None else None
    return (
        caller is not None
        and caller.f_code.co_name == "_run_once"
        and caller.f_globals.get("__name__") == "asyncio.base_events"
    )

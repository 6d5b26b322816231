"""An event loop whose clock stops while its process is stopped (Ctrl-Z, SIGSTOP).

Deadlines measure what other processes take. After an hour in the background, none has passed.
"""

from __future__ import annotations

import asyncio
import signal
import threading
import time
from types import FrameType


class AwakeLoop(asyncio.SelectorEventLoop):
    """On SIGCONT, its clock loses the time since it was last read: the stop, and the idle time before it. Outside the main
    thread, where signals do not arrive, it is an ordinary clock."""

    def __init__(self) -> None:
        self._stopped_s = 0.0
        self._seen = time.monotonic()
        super().__init__()
        self._hears = threading.current_thread() is threading.main_thread()
        if self._hears:  # no loop's handler: those run after the timers
            self._before = signal.signal(signal.SIGCONT, self._continued)

    def time(self) -> float:
        self._seen = time.monotonic()
        return self._seen - self._stopped_s

    def close(self) -> None:
        if self._hears and not self.is_closed():
            signal.signal(signal.SIGCONT, self._before)
        super().close()

    def _continued(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        self._stopped_s += now - self._seen
        self._seen = now

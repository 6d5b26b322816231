"""Find calls that block an event loop briefly: a sleep, a request, waiting for a program.

A thread watches the loop's own thread. If that sleeps in the kernel, at the same instruction, while a task of the loop is running, it
waits for something that it should have awaited. (Waiting for Python's lock looks the same for some milliseconds.)
"""

from __future__ import annotations

import asyncio
import sys
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType

LOOKED_EVERY_S = 0.01
WAITED_S = 0.3  # at one line, over the whole check: above, it is named
STARTS = "_execute_child"  # in subprocess: a program is being started, which asyncio does in the same way


class Waits:
    """Watches the thread that makes it, whose loop is running. If the system does not show what a thread does, it finds nothing."""

    def __init__(self, where: Callable[[FrameType | None], str], counts: Callable[[], bool]) -> None:
        """`where` names a frame; `counts` returns True if the present moment is watched."""
        self.waited: Counter[str] = Counter()  # by where: how often it was seen there twice in a row
        self._where, self._counts = where, counts
        self._loop = asyncio.get_running_loop()
        self._ident = threading.get_ident()
        self._status = Path(f"/proc/self/task/{threading.get_native_id()}/stat")
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="waits", daemon=True)

    def begin(self) -> None:
        if self._status.exists():
            self._thread.start()

    def end(self) -> None:
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join(1.0)

    def found(self) -> list[str]:
        """Return the lines that blocked the loop, with the seconds of each."""
        return [
            f"{where} kept it waiting for {count * LOOKED_EVERY_S:.1f} s in all"
            for where, count in self.waited.most_common()
            if count * LOOKED_EVERY_S >= WAITED_S
        ]

    def _watch(self) -> None:
        before: tuple[int, int] | None = None
        while not self._ended.wait(LOOKED_EVERY_S):
            frame = sys._current_frames().get(self._ident)
            now = None if frame is None or not self._sleeps(frame) else (id(frame), frame.f_lasti)
            if now is not None and now == before:
                self.waited[self._where(frame)] += 1
            before = now

    def _sleeps(self, frame: FrameType) -> bool:
        if not self._counts() or asyncio.current_task(self._loop) is None or frame.f_code.co_name == STARTS:
            return False
        return self._status.read_text().rpartition(")")[2].split()[0] == "S"

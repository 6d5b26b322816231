"""An event loop whose clock jumps to the next thing that is due: an hour of waiting takes no time, and its order is exact."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class Deadlock(AssertionError):
    """Everyone waits, and no clock will wake anyone."""


class _Selector(selectors.SelectSelector):
    """No file is ever ready; a wait for a time is over at once."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def select(self, timeout: float | None = None) -> list[Any]:
        if timeout is None:
            raise Deadlock("everyone waits for somebody else")
        self.now += max(timeout, 0.0)
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._virtual = _Selector()
        super().__init__(self._virtual)

    def time(self) -> float:
        return self._virtual.now


def run(main: Coroutine[Any, Any, T]) -> T:
    """The result of `main`, which must not use threads, files that become ready, or signals."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)

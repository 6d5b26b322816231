"""Show what is waited for: in the last line of a terminal, elsewhere once."""

from __future__ import annotations

import os
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from shutil import get_terminal_size
from threading import Thread
from time import perf_counter, sleep
from typing import TypeVar

from atropos_core.console.terminal import LINE, put, rich_console

T = TypeVar("T")

WAIT_S = 1.0  # shorter waits are not shown
WAIT_TICK_S = 0.25


@dataclass(eq=False)
class Wait:
    """Something that is waited for. `done`: which of its parts are finished, if it has parts."""

    what: str
    began: float = field(default_factory=perf_counter)
    done: str = ""
    said: bool = False
    after_s: float | None = None  # how long it may take before it is shown; None: WAIT_S

    def text(self, now: float) -> str:
        return f"{self.what}, {self.done or f'{now - self.began:.0f} s'}"


class _Waits:
    """The current waits, shown by a thread, because the waiting code may be busy, for example importing."""

    def __init__(self) -> None:
        self._waits: list[Wait] = []
        self._thread: Thread | None = None
        self._survives_fork = False
        self.pass_on: Callable[[int, str | None], object] | None = None

    def add(self, wait: Wait) -> None:
        if self.pass_on is not None:
            self.pass_on(id(wait), wait.what)
        with LINE.lock:
            self._waits.append(wait)
            if not self._survives_fork:
                self._survives_fork = True
                os.register_at_fork(after_in_child=_forget_all)
            if self._thread is None:
                self._thread = Thread(target=self._say, name="atropos-waits", daemon=True)
                self._thread.start()

    def remove(self, wait: Wait) -> None:
        if self.pass_on is not None:
            self.pass_on(id(wait), None)
        with LINE.lock:
            if wait in self._waits:  # not in a fork
                self._waits.remove(wait)
            if not self._waits:
                LINE.remove()

    def texts(self) -> list[str]:
        return [wait.text(perf_counter()) for wait in self._waits]

    def _say(self) -> None:
        while True:
            sleep(WAIT_TICK_S)
            with LINE.lock:
                if not self._waits:
                    self._thread = None
                    return
                now = perf_counter()
                noticed = [
                    wait
                    for wait in self._waits
                    if now - wait.began >= (WAIT_S if wait.after_s is None else wait.after_s)
                ]
                if noticed and sys.stderr.isatty():
                    line = f"waiting for {'; '.join(wait.text(now) for wait in noticed)}"
                    LINE.show(_cut(line, get_terminal_size().columns - 1), sys.stderr, stays=False)
                    continue
                for wait in noticed:
                    if not wait.said:
                        wait.said = True
                        put(rich_console(stderr=True), f"waiting for {wait.what}", markup=False)

    def forget(self) -> None:
        self._waits, self._thread = [], None


_WAITS = _Waits()


def _forget_all() -> None:
    LINE.forget()
    _WAITS.forget()


@contextmanager
def waiting(what: str, *, said: bool = False, after_s: float | None = None) -> Iterator[Wait]:
    """Show on standard error what is waited for, after `after_s` (by default one second). A terminal shows it in its last line, with its
    duration; elsewhere one line is printed, unless it was `said` already. `what` continues "waiting for"."""
    wait = begin_wait(what, said=said, after_s=after_s)
    try:
        yield wait
    finally:
        end_wait(wait)


def begin_wait(what: str, *, said: bool = False, after_s: float | None = None) -> Wait:
    """Begin a wait like `waiting`, for one that ends in other code."""
    wait = Wait(what, said=said, after_s=after_s)
    _WAITS.add(wait)
    return wait


def end_wait(wait: Wait) -> None:
    _WAITS.remove(wait)


def waited_for() -> list[str]:
    """Return what is waited for now, and since when."""
    with LINE.lock:
        return _WAITS.texts()


def pass_waits_on(to: Callable[[int, str | None], object]) -> None:
    """Pass waits to the process that waits for this one: `to` gets a number and what is waited for, then None at its end."""
    _WAITS.pass_on = to


async def waited(what: str, work: Awaitable[T], *, after_s: float | None = None) -> T:
    """Return the result of `work`, which is shown as waited for (see `waiting`)."""
    with waiting(what, after_s=after_s):
        return await work


def _cut(line: str, columns: int) -> str:
    return line if len(line) <= columns else f"{line[: max(columns - 1, 0)]}…"

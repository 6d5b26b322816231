"""Jobs that would block an event loop. One thread of the process does the long ones, one after another, and another thread the short
ones.

There are only two threads, so that the loop waits only milliseconds for Python's lock, however many jobs are queued.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from functools import partial
from typing import Any, TypeVar

LONG = 20_000  # characters, VALUE of them for each value: what takes some milliseconds to read or to render
VALUE = 32
_THREAD = ThreadPoolExecutor(1, "apart")
_SHORT = ThreadPoolExecutor(1, "apart-short")  # a short job does not wait for a long one
_ALL: ContextVar[bool] = ContextVar("all_apart", default=False)

T = TypeVar("T")


async def apart(function: Callable[..., T], *arguments: Any, **named: Any) -> T:
    """Call the function in the thread of long jobs. Raises what it raises. Cancelling does not stop the function."""
    return await asyncio.get_running_loop().run_in_executor(_THREAD, partial(function, *arguments, **named))


async def apart_if_long(value: Any, function: Callable[..., T], *arguments: Any, **named: Any) -> T:
    """Call the function in that thread if `value`, its input, is long; otherwise call it directly."""
    if is_long(value):
        return await apart(function, *arguments, **named)
    if _ALL.get():
        return await asyncio.get_running_loop().run_in_executor(_SHORT, partial(function, *arguments, **named))
    return function(*arguments, **named)


@contextlib.contextmanager
def all_apart() -> Iterator[None]:
    """Inside the block, `apart_if_long` calls every function in a thread: with some chat templates even a short text takes long,
    and a client could know that text. A short job then takes about 0.08 ms more, and other tasks run before it is done."""
    before = _ALL.set(True)
    try:
        yield
    finally:
        _ALL.reset(before)


def _new_threads() -> None:
    """After a fork: the parent's threads do not exist here."""
    global _THREAD, _SHORT
    _THREAD, _SHORT = ThreadPoolExecutor(1, "apart"), ThreadPoolExecutor(1, "apart-short")


os.register_at_fork(after_in_child=_new_threads)


def is_long(value: Any) -> bool:
    """Return True if a JSON value has more than LONG characters in all. Stops counting there."""
    return characters(value, LONG) > LONG


def characters(value: Any, most: int, each: int = VALUE) -> int:
    """Return the number of characters in a JSON value, plus `each` per value in it. Exact up to `most`; above it, some larger
    number."""
    found, waiting = 0, [iter((value,))]
    while waiting and found <= most:
        for one in waiting[-1]:
            found += each + (len(one) if isinstance(one, str | bytes) else 0)
            if isinstance(one, Mapping):
                waiting.append(iter((*one, *one.values())))
                break
            if isinstance(one, list | tuple):
                waiting.append(iter(one))
                break
            if found > most:
                break
        else:
            waiting.pop()
    return found

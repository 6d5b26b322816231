"""Work that would keep an event loop from everything else: one thread of the process does it, one job after another.

One thread, so that however many jobs wait, the loop shares Python with a single other thread and waits milliseconds for it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

LONG = 20_000  # characters, VALUE of them for each value: what takes some milliseconds to read or to render
VALUE = 32
_THREAD = ThreadPoolExecutor(1, "apart")

T = TypeVar("T")


async def apart(function: Callable[..., T], *arguments: Any, **named: Any) -> T:
    """Call it in that thread. Raises what it raises. Cancelled, it is computed all the same."""
    return await asyncio.get_running_loop().run_in_executor(_THREAD, partial(function, *arguments, **named))


async def apart_if_long(value: Any, function: Callable[..., T], *arguments: Any, **named: Any) -> T:
    """The same where `value`, which the function is about, is long; else at once."""
    return await apart(function, *arguments, **named) if is_long(value) else function(*arguments, **named)


def is_long(value: Any) -> bool:
    """Whether a value of JSON's kind has more than LONG characters in all. Looks at no more of it than that takes."""
    return characters(value, LONG) > LONG


def characters(value: Any, most: int) -> int:
    """How many characters it has, VALUE of them for each value in it: exact up to `most`, above it some larger number."""
    found, waiting = 0, [iter((value,))]
    while waiting and found <= most:
        for one in waiting[-1]:
            found += VALUE + (len(one) if isinstance(one, str | bytes) else 0)
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

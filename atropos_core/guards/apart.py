"""Long jobs that would block an event loop. One thread of the process does them, one after another.

There is only one thread, so that the loop waits only milliseconds for Python's lock, however many jobs are queued.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from json.scanner import py_make_scanner  # type: ignore[attr-defined] # there in every Python, in no stub
from typing import Any, TypeVar

LONG = 20_000  # characters, VALUE of them for each value: what takes some milliseconds to read or to render
VALUE = 32
_THREAD = ThreadPoolExecutor(1, "apart")

T = TypeVar("T")


async def apart(function: Callable[..., T], *arguments: Any, **named: Any) -> T:
    """Call the function in that thread. Raises what it raises. Cancelling does not stop the function."""
    return await asyncio.get_running_loop().run_in_executor(_THREAD, partial(function, *arguments, **named))


async def apart_if_long(value: Any, function: Callable[..., T], *arguments: Any, **named: Any) -> T:
    """Call the function in that thread if `value`, its input, is long, or else at once."""
    return await apart(function, *arguments, **named) if is_long(value) else function(*arguments, **named)


def loads_in_turns(text: str, **options: Any) -> Any:
    """As `json.loads`, in up to ten times its time: written in Python, so that other threads have their turn. The reader in C has
    Python's lock until it has read everything. Raises ValueError, RecursionError."""
    decoder = json.JSONDecoder(**options)
    decoder.scan_once = py_make_scanner(decoder)  # type: ignore[attr-defined] # as above
    return decoder.decode(text)


def is_long(value: Any) -> bool:
    """Return True if a JSON value has more than LONG characters in all. Stops counting there."""
    return characters(value, LONG) > LONG


def characters(value: Any, most: int) -> int:
    """The number of characters in a JSON value, with VALUE added for each value in it. Exact up to `most`, or else some larger number."""
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

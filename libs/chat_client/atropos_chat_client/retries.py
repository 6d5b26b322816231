"""Retries of a call to a server: when to try again, and how long to wait (Retry-After, backoff)."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Awaitable, Callable
from typing import TypeVar

from atropos_chat_client.client import CallFailed

T = TypeVar("T")

LONGEST_PAUSE_S = 20.0
LONGEST_ASKED_S = 60.0  # a longer pause that a server asks for is cut to this


async def repeat(
    call: Callable[[], Awaitable[T]], *, pause_s: float, tries: int | None = None, jitter: float = 0.0
) -> T:
    """Return what `call` returns. `pause_s`: before the second try; doubled before each further one up to LONGEST_PAUSE_S, and longer
    if the server asks for that. `jitter` makes each pause up to this share shorter or longer. Without `tries`, the caller sets a
    deadline. Raises the last CallFailed, at once if it is not temporary."""
    for attempt in itertools.count(1):
        try:
            return await call()
        except CallFailed as failed:
            if not failed.is_temporary or attempt == tries:
                raise
            own_s = pause_s * random.uniform(1 - jitter, 1 + jitter)
            await asyncio.sleep(max(own_s, min(failed.retry_after_s, LONGEST_ASKED_S)))
            pause_s = max(min(2 * pause_s, LONGEST_PAUSE_S), pause_s)
    raise AssertionError("itertools.count has no end")

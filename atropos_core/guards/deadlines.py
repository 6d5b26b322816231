"""Deadlines on calls that may never return."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

from atropos_core.errors import DeadlineExceeded
from atropos_core.guards.exits import contained

T = TypeVar("T")


async def within(what: Awaitable[T], deadline_s: float, name: str) -> T:
    """Await `what`, or raise DeadlineExceeded that names it. A TimeoutError of its own is passed on unchanged. If it ends by a
    cancellation from inside it, or by what ends a process, that becomes an ordinary error."""
    try:
        async with asyncio.timeout(deadline_s) as limit:
            with contained(name):
                return await what
    except TimeoutError:
        if not limit.expired():
            raise
        raise DeadlineExceeded(f"{name} gave no answer within {deadline_s:g} s") from None
    except asyncio.CancelledError as error:
        current = asyncio.current_task()
        if current is None or current.cancelling():
            raise
        raise RuntimeError(f"{name} awaited something that was cancelled") from error

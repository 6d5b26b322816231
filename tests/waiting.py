"""Waits of tests. They end as soon as what they wait for is there, so their deadline may be long: a busy machine is slow."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import psutil

WITHIN_S = 60.0


async def until(holds: Callable[[], object], what: str, within_s: float = WITHIN_S) -> None:
    """Let the event loop run until this holds. Fails with `what` if it never does."""
    end = time.monotonic() + within_s
    while not holds():
        assert time.monotonic() < end, f"not within {within_s:g} s: {what}"
        await asyncio.sleep(0.005)


def wait_until(holds: Callable[[], object], what: str, within_s: float = WITHIN_S) -> None:
    """The same without an event loop, or while it is to stand still."""
    end = time.monotonic() + within_s
    while not holds():
        assert time.monotonic() < end, f"not within {within_s:g} s: {what}"
        time.sleep(0.005)


def has_ended(pid: int) -> bool:
    """Return true if this process has ended, whether or not its parent has heard of it."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def is_stopped(pid: int) -> bool:
    return psutil.Process(pid).status() == psutil.STATUS_STOPPED

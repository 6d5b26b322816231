"""Notice that the process at the other end of a ring is stopped."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

from atropos_core import console
from atropos_core.errors import ProcessSilent
from atropos_core.guards.patience import LOOK_S, Patience


async def stopped_too_long(name: str, pid: int, patience: Patience, owes: Callable[[], bool]) -> ProcessSilent:
    """Warn when a process of this machine is stopped while it has calls to answer. Return the error once that has lasted
    `patience.least_s`."""
    loop, since, reported = asyncio.get_running_loop(), None, False
    while True:
        await asyncio.sleep(min(LOOK_S, patience.say_s / 8))
        if not (owes() and _is_stopped(pid)):
            if reported:
                console.say(f"{name} (pid {pid}) continues")
            since, reported = None, False
            continue
        since = since or loop.time()
        stopped_s = loop.time() - since
        if stopped_s >= patience.least_s:
            return ProcessSilent(
                f"{name} (pid {pid}) has been stopped for {stopped_s:.0f} s.",
                remedy=f"To continue it: kill -CONT {pid}. If it must stay stopped for longer, raise watch.least_s.",
            )
        if not reported and stopped_s >= patience.say_s / 2:
            reported = True
            console.warn(
                f"{name} (pid {pid}) is stopped, and is waited for; to continue it: kill -CONT {pid}. It is given up after "
                f"{patience.least_s:.0f} s (watch.least_s)."
            )


def _is_stopped(pid: int) -> bool:
    """True if a signal or a debugger has stopped it. False if it has ended, or is on another machine or in another container."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[0] in "Tt"
    except OSError:
        return False

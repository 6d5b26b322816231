"""The memory of this process and everything under it: shared pages are counted once (PSS)."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

EVERY_S = 2.0


@dataclass
class Peak:
    size_bytes: int = 0


def family(pid: int) -> Iterator[int]:
    """Yield a process and all of its descendants, without those that end meanwhile."""
    yield pid
    try:
        threads = list((Path("/proc") / str(pid) / "task").iterdir())
        children = [child for thread in threads for child in (thread / "children").read_text().split()]
    except OSError:
        return
    for child in children:
        yield from family(int(child))


def pss_bytes(pid: int) -> int:
    """Return the proportional set size: a page that n processes map counts for 1/n in each. 0 if it cannot be read."""
    try:
        for line in (Path("/proc") / str(pid) / "smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return 0


@asynccontextmanager
async def watched_memory() -> AsyncIterator[Peak]:
    """Measure the largest sum over all processes of this run, every two seconds, in a thread."""
    peak = Peak()

    def look() -> None:
        peak.size_bytes = max(peak.size_bytes, sum(pss_bytes(pid) for pid in family(os.getpid())))

    async def watch() -> None:
        while True:
            await asyncio.to_thread(look)
            await asyncio.sleep(EVERY_S)

    watching = asyncio.create_task(watch())
    try:
        yield peak
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)

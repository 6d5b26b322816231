"""What the hub costs a group: puts and leases a second, the first batch behind a queue, memory beside the payload.

`python benchmarks/hub.py [--groups 20000]`. In memory, then on a journal in the temporary directory, whose own plain
writes and syncs are measured beside it: what a journal adds is mostly the disk's.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import os
import tempfile
from pathlib import Path
from time import perf_counter

from atropos_core.hub.hub import Hub
from atropos_core.hub.records import BatchSize, Label, Limits
from atropos_trajectory_api.journal.log import Sync
from atropos_trajectory_api.journal.store import JournalStore

SIZES = {"8 x 64": 4_200, "8 x 1024": 66_000}  # bytes of an encoded group with logprobs
BATCH = BatchSize(sequences=512)


async def measure(name: str, groups: int, sync: Sync | None, directory: Path) -> None:
    store = JournalStore(directory / "journal", sync=sync) if sync else None
    hub: Hub[bytes] = Hub(Limits(10**12), max_staleness=4, on_dropped=lambda *_: None, store=store)
    block = os.urandom(SIZES[name])
    resident = _resident()
    start = perf_counter()
    for number in range(groups):
        label = Label(f"environment-{number % 4}", 8, len(block), 1, number, f"task-{number}")
        await hub.put(block, label, key=f"key-{number}")
    put_s = perf_counter() - start
    added = (_resident() - resident) / groups
    session = hub.open("benchmark")
    start = perf_counter()
    first = await session.lease(BATCH, 1, 60)
    first_s = perf_counter() - start
    session.commit([entry.id for entry in first])
    left = len(hub)
    start = perf_counter()
    while len(hub) >= len(first):
        session.commit([entry.id for entry in await session.lease(BATCH, 1, 60)])
    lease_s = perf_counter() - start
    print(
        f"{name:<9} {sync or 'memory':<7} {groups / put_s:>9,.0f} puts/s {left / lease_s:>9,.0f} leases/s  "
        f"first batch {1e3 * first_s:.2f} ms  {added:,.0f} bytes a group beside the payload"
    )
    if store:
        store.close()


def write_plainly(directory: Path, size_bytes: int, writes: int, synced: bool) -> None:
    """The floor under a journal on this disk."""
    block, start = os.urandom(size_bytes), perf_counter()
    with (directory / "plain").open("wb", buffering=0) as file:
        for _ in range(writes):
            file.write(block)
            if synced:
                os.fdatasync(file.fileno())
    words = "write + fdatasync" if synced else "write"
    print(f"plain {words} of {size_bytes:,} bytes: {1e6 * (perf_counter() - start) / writes:.1f} us")
    (directory / "plain").unlink()


def _resident() -> int:
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--groups", type=int, default=20_000)
    groups = parser.parse_args().groups
    syncs: tuple[Sync | None, ...] = (None, "never", "second", "always")
    for name, size_bytes in SIZES.items():
        with tempfile.TemporaryDirectory() as folder:
            write_plainly(Path(folder), size_bytes, min(groups, 2000), synced=False)
            write_plainly(Path(folder), size_bytes, min(groups, 200), synced=True)
        for sync in syncs:
            with tempfile.TemporaryDirectory() as folder:
                asyncio.run(measure(name, groups if sync != "always" else min(groups, 500), sync, Path(folder)))


if __name__ == "__main__":
    main()

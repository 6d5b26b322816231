"""Memory over all processes of a run."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys

from atropos_core.footprint import family, pss_bytes, watched_memory

HOLDS = "import sys; held = bytearray(b'x' * {size}); print('ready', flush=True); sys.stdin.read()"
SIZE = 200_000_000


def holding(size: int) -> subprocess.Popen:
    made = subprocess.Popen(
        [sys.executable, "-c", HOLDS.format(size=size)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert made.stdout is not None and made.stdout.readline() == b"ready\n"
    return made


def test_a_family_is_the_process_and_what_it_started():
    child = holding(1)
    assert {os.getpid(), child.pid} <= set(family(os.getpid()))
    child.kill()
    child.wait()
    assert child.pid not in set(family(os.getpid()))
    assert list(family(child.pid)) == [child.pid]
    assert pss_bytes(child.pid) == 0, "it has ended"


async def test_the_peak_counts_children():
    async with watched_memory() as alone:
        await asyncio.sleep(0.3)
    child = holding(SIZE)
    async with watched_memory() as together:
        await asyncio.sleep(0.3)
    child.kill()
    child.wait()
    # A page that several processes have counts in parts: when others start, this one's own share falls a little.
    assert SIZE * 0.8 < together.size_bytes - alone.size_bytes < SIZE * 1.3

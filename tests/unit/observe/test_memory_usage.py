"""Memory over all processes of a run."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys

from atropos_core.observe.memory_usage import Peak, family, pss_bytes, watched_memory

HOLDS = "import sys; held = bytearray(b'x' * {size}); print('ready', flush=True); sys.stdin.read()"
SIZE = 200_000_000


SHARES = """
import mmap, os, sys
shared = mmap.mmap(-1, {size})
shared.write(b"x" * {size})
ready, told = os.pipe()
if os.fork() == 0:
    assert len(shared[::4096]) >= {size} // 4096  # each page is there
    os.write(told, b"1")
    sys.stdin.read()
    os._exit(0)
os.read(ready, 1)
print("ready", flush=True)
sys.stdin.read()
"""


def holding(size: int, source: str = HOLDS) -> subprocess.Popen:
    made = subprocess.Popen(
        [sys.executable, "-c", source.format(size=size)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
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


def test_a_page_that_two_processes_share_counts_once():
    child = holding(SIZE, SHARES)
    processes = list(family(child.pid))
    held = sum(pss_bytes(pid) for pid in processes)
    assert child.stdin is not None
    child.stdin.close()  # both end by themselves
    child.wait()
    assert len(processes) == 2
    assert SIZE * 0.9 < held < SIZE * 1.3


async def test_the_peak_counts_children():
    async def looked_at(peak: Peak) -> None:
        async with asyncio.timeout(60):
            while not peak.size_bytes:
                await asyncio.sleep(0.01)

    async with watched_memory() as alone:
        await looked_at(alone)
    child = holding(SIZE)
    async with watched_memory() as together:
        await looked_at(together)
    child.kill()
    child.wait()
    # A page that several processes have counts in parts: when others start, this one's own share falls a little.
    assert SIZE * 0.8 < together.size_bytes - alone.size_bytes < SIZE * 1.3

"""Freed blocks are kept for the next ones, and given back at once."""

from __future__ import annotations

import json
import os
import subprocess
import sys

PROGRAM = """
import json, resource, sys

import torch
from atropos_torch_models.allocation import keep_blocks, return_blocks

torch.set_num_threads(1)
if sys.argv[1] == "kept":
    keep_blocks()


def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def work():
    for _ in range(20):
        blocks = [torch.ones(1_500_000) for _ in range(8)]  # 6 MB each
        del blocks


def resident():
    return int(open("/proc/self/statm").read().split()[1]) * 4096


work()
before = faults()
work()
again, held = faults() - before, resident()
return_blocks()
print(json.dumps([again, held - resident()]))
"""


def measured(how: str) -> list[int]:
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM, how], capture_output=True, text=True, timeout=300, check=True,
        # as glibc begins; otherwise it raises the limit by itself, and then keeps blocks or not as the heap happens to end
        env={**os.environ, "MALLOC_MMAP_THRESHOLD_": "131072"},
    )  # fmt: skip
    found: list[int] = json.loads(ended.stdout)
    return found


def test_a_block_is_filled_by_the_system_once_and_given_back_at_once() -> None:
    (usual, _), (kept, returned) = measured("usual"), measured("kept")
    assert kept < 500 < 20_000 < usual  # pages of 4 KiB: 20 rounds of 48 MB have 234,000
    assert returned > 40e6

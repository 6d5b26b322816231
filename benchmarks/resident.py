"""Resident memory of this process, from /proc. Imports nothing of ours: the environments of others use it too."""

from __future__ import annotations

import gc
from pathlib import Path


def settle() -> int:
    """Bytes resident now; the highest mark is counted from here on."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")
    return _field("VmRSS")


def highest(process: int | str = "self") -> int:
    """Bytes resident at most since `settle`; of another process, ever."""
    return _field("VmHWM", process)


def _field(name: str, process: int | str = "self") -> int:
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name + ":"))

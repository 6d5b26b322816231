"""The memory of this machine that a run may have: what is free, within the limits of control groups and of the shell."""

from __future__ import annotations

import resource
import subprocess
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

NVIDIA_SMI = ("nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits")
GROUPS = Path("/sys/fs/cgroup")
NO_LIMIT = 1 << 60  # control groups of version 1 say a number near 2**63 for no limit


def available_bytes(*, busy: bool = True) -> dict[str, int]:
    """Return the memory that this run could have: what the system can free for it, and all of each GPU. Without `busy`, other
    programs' memory counts too, so that the answer is always the same on one machine."""
    from atropos_core.plugins.requirements import cuda_devices

    total, free = host_memory()
    host = free if busy else total
    return ({"cpu": host} if host else {}) | (_gpus() if cuda_devices() else {})


@lru_cache(maxsize=1)
def _gpus() -> dict[str, int]:
    try:
        said = subprocess.run(NVIDIA_SMI, capture_output=True, text=True, timeout=20, check=True).stdout
        return {f"cuda:{index}": int(line) << 20 for index, line in enumerate(said.split())}
    except (OSError, ValueError, subprocess.SubprocessError):
        return {}  # then it is not known, and nothing is refused for it


def host_memory() -> tuple[int, int]:
    """Return total and available bytes, 0 if unknown. Respects the limits of control groups, not counting the file cache that they
    can drop, and `ulimit -v` and `-d`, which hold for each process and are here taken for the whole run."""
    try:
        rows = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
        total, free = (int(rows[name].split()[0]) * 1024 for name in ("MemTotal", "MemAvailable"))
    except (OSError, KeyError, ValueError):
        return 0, 0
    for limit, used in group_limits():
        total, free = min(total, limit), min(free, max(limit - used, 0))
    for kind in (resource.RLIMIT_AS, resource.RLIMIT_DATA):
        if (limit := resource.getrlimit(kind)[0]) != resource.RLIM_INFINITY:
            total, free = min(total, limit), min(free, limit)
    return total, free


def group_limits(groups: Path = GROUPS, own_groups: Path = Path("/proc/self/cgroup")) -> Iterator[tuple[int, int]]:
    """Yield limit and used bytes of each control group that this process is in, of version 2 or 1: its own and those above it."""
    try:
        lines = [line.split(":", 2) for line in own_groups.read_text().splitlines()]
    except OSError:
        lines = []
    own = {name: path for _, names, path in lines for name in names.split(",")}
    v1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
    yield from _limits(groups, own.get("", "/"), "memory.max", "memory.current", "inactive_file")
    yield from _limits(groups / "memory", own.get("memory", "/"), *v1)


def _limits(root: Path, own: str, most: str, used: str, cache: str) -> Iterator[tuple[int, int]]:
    inside = root / own.lstrip("/")
    lowest = inside if inside.is_dir() else root  # in a container, the root is its own group
    for group in (lowest, *lowest.parents):
        try:
            limit, current = (int((group / name).read_text()) for name in (most, used))
            held = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
            if limit < NO_LIMIT:
                yield limit, current - int(held[cache])
        except (OSError, KeyError, ValueError):
            pass  # no limit ("max"), or no such group
        if group == root:
            return

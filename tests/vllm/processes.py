"""Which process of a run is which part of vLLM."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable
from pathlib import Path

import psutil

ROLES = ("worker", "core", "server", "guard")
SIGNS = {
    "guard": "atropos_engine_vllm.guard",
    "server": "atropos_engine_vllm.server_main",
    "core": "VLLM::EngineCore",
    "worker": "VLLM::Worker",
}


def vllm_processes(above: psutil.Process) -> dict[str, psutil.Process]:
    """guard, server, core and worker of the only engine below this process. On one GPU vLLM starts no process for its worker,
    which then lives in the core: both names are the core's."""
    found: dict[str, psutil.Process] = {}
    for process in above.children(recursive=True):
        command = process.cmdline()
        for name, sign in SIGNS.items():
            if any(part.startswith(sign) for part in command):
                assert name not in found, f"{found[name]} and {process} are both {name}"
                found[name] = process
    if "core" in found:
        found.setdefault("worker", found["core"])
    return found


def segments(processes: Iterable[psutil.Process]) -> set[str]:
    """The files in /dev/shm that these processes map."""
    found: set[str] = set()
    for process in processes:
        try:
            found |= set(re.findall(r"/dev/shm/(\S+)", Path(f"/proc/{process.pid}/maps").read_text()))
        except OSError:
            continue  # it has ended
    return found


def left(names: set[str]) -> set[str]:
    return {path.name for path in Path("/dev/shm").iterdir()} & names


def still_running(processes: list[psutil.Process], within_s: float) -> list[psutil.Process]:
    """Those that have not ended by then. One that nobody has waited for yet has ended."""
    until = time.monotonic() + within_s
    while True:
        alive = [one for one in processes if _runs(one)]
        if not alive or time.monotonic() > until:
            return alive
        time.sleep(0.02)


def _runs(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False

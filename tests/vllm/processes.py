"""Which process of a run is which part of vLLM."""

from __future__ import annotations

import psutil

from tests.vllm.hosted import SIGNS

ROLES = ("worker", "core", "server", "guard")


def vllm_processes(supervisor: psutil.Process) -> dict[str, psutil.Process]:
    """guard, server, core and worker of a run's only engine."""
    return {
        name: process
        for process in supervisor.children(recursive=True)
        for name, sign in SIGNS.items()
        if any(part.startswith(sign) for part in process.cmdline())
    }

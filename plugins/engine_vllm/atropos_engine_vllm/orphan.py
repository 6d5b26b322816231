"""End a server's processes with their parent.

vLLM's engine core keeps waiting for a client that is gone, and its worker for a core that is gone. The guard ends them all;
this module covers the case that the guard was killed too.
"""

from __future__ import annotations

import multiprocessing
import os
import select
import signal
import threading

GUARD_VARIABLE = "ATROPOS_VLLM_GUARD"  # environment variable with the guard's pid, set for servers that we start

_watching = False


def watch_parent() -> None:
    """End this process at once when the one that started it ends. May be called several times."""
    global _watching
    parent = multiprocessing.parent_process()
    if parent is None or parent.pid is None or _watching:
        return  # the server itself, which the kernel ends with its guard
    _watching = True
    try:
        descriptor = os.pidfd_open(parent.pid)
    except ProcessLookupError:
        os.kill(os.getpid(), signal.SIGKILL)
    if os.getppid() != parent.pid:  # the number may be another's by now
        os.kill(os.getpid(), signal.SIGKILL)
    threading.Thread(target=_end_with, args=(descriptor,), name="atropos-orphan", daemon=True).start()


def _end_with(descriptor: int) -> None:
    select.select([descriptor], [], [])
    os.kill(os.getpid(), signal.SIGKILL)

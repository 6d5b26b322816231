"""How much memory two processes take: on a GPU what the device has given out, on a CPU their own and shared pages."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch


class Memory:
    """Of one device. On a GPU other processes count as well: nothing else may run there."""

    def __init__(self, device: str, pids: Sequence[int] = ()) -> None:
        self.pids = pids
        self.peak_bytes = 0
        self._device = device

    def used_bytes(self) -> int:
        if self._device == "cpu":
            return sum(map(_pages_bytes, self.pids))
        free, total = torch.cuda.mem_get_info(self._device)
        return total - free

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Inside, `peak_bytes` follows what is used, every few milliseconds."""
        done = threading.Event()

        def look() -> None:
            while not done.wait(0.005):
                self.peak_bytes = max(self.peak_bytes, self.used_bytes())

        thread = threading.Thread(target=look)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()


def _pages_bytes(pid: int) -> int:
    """Without files that are mapped: a model that is being loaded maps its file, and the kernel may drop those pages.
    Shared pages count in proportion. 0 for a process that has ended."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith(("Pss_Anon:", "Pss_Shmem:")))

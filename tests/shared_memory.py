"""What processes of a test leave in /dev/shm. Others on this machine make and leave files there as well, so only those count
that this process or one that it started had open."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

SHM = Path("/dev/shm")
LOOK_EVERY_S = 0.5
_MAPPED = re.compile(rf"^(?:\S+\s+){{4}}(\d+)\s+{SHM}/", re.MULTILINE)  # of /proc/PID/maps: the number before the name


class SharedFiles:
    """Those files, as of each look. A process that ends takes what it had along, so look before it does."""

    def __init__(self) -> None:
        self.seen: set[int] = set()  # by the number of the file: a semaphore gets its name after it was mapped

    def look(self) -> None:
        self.seen |= _open_now()

    def left(self) -> set[str]:
        """The names of those that are still there, and that none of these processes has open any more."""
        gone = self.seen - _open_now()
        return {name for name, number in _there() if number in gone}

    @contextmanager
    def watching(self) -> Iterator[SharedFiles]:
        """Look again and again meanwhile."""
        ended = threading.Event()

        def watch() -> None:
            while not ended.wait(LOOK_EVERY_S):
                self.look()

        watcher = threading.Thread(target=watch, daemon=True)
        watcher.start()
        try:
            yield self
        finally:
            ended.set()
            watcher.join()


def _there() -> Iterator[tuple[str, int]]:
    for path in SHM.iterdir():
        try:
            yield path.name, path.stat().st_ino
        except FileNotFoundError:
            continue  # another's, removed meanwhile


def _open_now() -> set[int]:
    me = psutil.Process()
    return set().union(*(_numbers(Path(f"/proc/{process.pid}")) for process in [me, *me.children(recursive=True)]))


def _numbers(process: Path) -> set[int]:
    try:
        maps, links = (process / "maps").read_text(), list((process / "fd").iterdir())
    except OSError:
        return set()  # it has ended
    found = {int(number) for number in _MAPPED.findall(maps)}
    for link in links:
        with suppress(OSError):  # closed meanwhile
            if os.readlink(link).startswith(f"{SHM}/"):
                found.add(link.stat().st_ino)
    return found

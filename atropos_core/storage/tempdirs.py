"""Temporary directories of a role's process, named after it: what a killed one left is known, and removed by the next."""

from __future__ import annotations

import os
import shutil
import stat
import tempfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def owned_prefix(role: str) -> str:
    """For `tempfile`: the role, and which process this is."""
    return f"atropos-{role}-{_namespace()}-{os.getpid()}-{_started(os.getpid()) or 0}-"


@contextmanager
def owned_directory(role: str) -> Iterator[Path]:
    """A temporary directory, removed at the end; where this process is killed, by the next of its role."""
    sweep(role)
    with tempfile.TemporaryDirectory(prefix=owned_prefix(role)) as directory:
        yield Path(directory)


def sweep(role: str) -> None:
    """Remove what processes of this role and this user left that are no more. One whose end cannot be seen from here
    (on another machine, or in another container) keeps its own."""
    for path in Path(tempfile.gettempdir()).glob(f"atropos-{role}-{_namespace()}-*-*-*"):
        if not was_left(path.name, role):
            continue
        try:
            state = path.lstat()
        except OSError:
            continue  # another sweep was sooner
        if stat.S_ISDIR(state.st_mode) and state.st_uid == os.getuid():
            shutil.rmtree(path, ignore_errors=True)


def was_left(name: str, role: str) -> bool:
    """Whether something of this name (see `owned_prefix`) is of a process of this role, seen from here, that is no more."""
    pid, started = [*name.rsplit("-", 3), "", ""][1:3]  # a role may have a dash, and a name of tempfile's none
    if not (name.startswith(f"atropos-{role}-{_namespace()}-") and pid.isdecimal() and started.isdecimal()):
        return False
    # with no /proc here, nobody's end can be seen
    return _started(os.getpid()) is not None and _started(int(pid)) != int(started)


def _namespace() -> int:
    """Of process ids: the first one has the same number on every machine, and machines may share a directory."""
    try:
        number = os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        number = 0
    return zlib.crc32(f"{os.uname().nodename}/{number}".encode())


def _started(pid: int) -> int | None:
    """When a process began, in clock ticks since boot. None: there is no such process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    return int(text[text.rindex(")") + 2 :].split()[19])  # the name before may hold anything

"""Temporary directories named after a role's process, so that the next one can remove what a killed one left."""

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
    """Return a prefix for `tempfile`: the role, and this process's identity."""
    return f"atropos-{role}-{_namespace()}-{os.getpid()}-{_started(os.getpid()) or 0}-"


@contextmanager
def owned_directory(role: str) -> Iterator[Path]:
    """Yield a temporary directory. It is removed at the end, or, if this process is killed, by the next one of its role."""
    sweep(role)
    with tempfile.TemporaryDirectory(prefix=owned_prefix(role)) as directory:
        yield Path(directory)


def sweep(role: str) -> None:
    """Remove directories that ended processes of this role and user left. Directories of processes whose end cannot be seen from
    here (on another machine, or in another container) are kept."""
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
    """True if a directory of this name (see `owned_prefix`) belongs to an ended process of this role that could be seen here."""
    pid, started = [*name.rsplit("-", 3), "", ""][1:3]  # a role may have a dash, and a name of tempfile's none
    if not (name.startswith(f"atropos-{role}-{_namespace()}-") and pid.isdecimal() and started.isdecimal()):
        return False
    # without /proc, no process's end can be seen
    return _started(os.getpid()) is not None and _started(int(pid)) != int(started)


def _namespace() -> int:
    """Identify the namespace of process ids: machines may share a directory, and pids start at the same number on each."""
    try:
        number = os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        number = 0
    return zlib.crc32(f"{os.uname().nodename}/{number}".encode())


def _started(pid: int) -> int | None:
    """Return when a process began, in clock ticks since boot, or None if there is no such process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    return int(text[text.rindex(")") + 2 :].split()[19])  # the name before may hold anything

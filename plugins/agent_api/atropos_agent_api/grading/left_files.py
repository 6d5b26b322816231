"""A copy of a work directory as a program left it, for a reward to read.

The program may have made anything: a pipe that is read for ever, a link to another episode's files, a million names. The
copy has directories, regular files, and links that stay inside; `LeftFiles` says what was left out.
"""

from __future__ import annotations

import os
import shutil
import stat
from dataclasses import dataclass
from pathlib import Path

from atropos_core.errors import DataError

MOST_ENTRIES = 100_000
DEEPEST = 64  # directories inside one another


@dataclass
class LeftFiles:
    """What a copy holds."""

    files: int = 0
    size_bytes: int = 0
    left_out: int = 0  # pipes, sockets, devices, links that lead elsewhere, what could not be read


def copy_left(source: Path, target: Path, most_bytes: int) -> LeftFiles:
    """Fill `target`, which is made here. Raises DataError where there is more than can be copied."""
    found, links = LeftFiles(), []
    target.mkdir(mode=0o700)
    waiting = [(source, target, 0)]
    entries = 0
    while waiting:
        here, there, depth = waiting.pop()
        try:
            listed = list(os.scandir(here))
        except OSError:
            found.left_out += 1
            continue
        entries += len(listed)
        if entries > MOST_ENTRIES or depth > DEEPEST:
            raise DataError(
                f"the program left more than {MOST_ENTRIES:,} files, or more than {DEEPEST} directories inside one another."
            )
        for entry in listed:
            if entry.is_symlink():
                links.append((Path(entry.path), there / entry.name))
            elif entry.is_dir(follow_symlinks=False):
                (there / entry.name).mkdir(mode=0o700)
                waiting.append((Path(entry.path), there / entry.name, depth + 1))
            else:
                _copy_file(Path(entry.path), there / entry.name, most_bytes, found)
    for link, there in links:
        os.symlink(os.readlink(link), there)
    inside = f"{os.path.realpath(target)}{os.sep}"
    for _, there in links:  # once all are there: one may lead through another
        if not f"{os.path.realpath(there)}{os.sep}".startswith(inside):
            there.unlink()
            found.left_out += 1
    return found


def _copy_file(path: Path, target: Path, most_bytes: int, found: LeftFiles) -> None:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)  # a pipe opens at once
    except OSError:
        found.left_out += 1
        return
    with open(descriptor, "rb") as file:
        seen = os.fstat(descriptor)
        if not stat.S_ISREG(seen.st_mode):
            found.left_out += 1
            return
        if found.size_bytes + seen.st_size > most_bytes:
            raise DataError(
                f"the program left more than {most_bytes / 2**20:,.0f} MB.",
                remedy="Raise limits.disk_mb where that is right.",
            )
        with target.open("wb") as copy:
            shutil.copyfileobj(file, copy)
        target.chmod(0o600 | (seen.st_mode & 0o100))
    found.files += 1
    found.size_bytes += seen.st_size

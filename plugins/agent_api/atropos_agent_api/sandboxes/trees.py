"""Measure, copy and remove directories that an untrusted program wrote, whatever it did to them.

Links are never followed, nothing is read from pipes or devices, and no depth causes an error. Only the standard library.
"""

from __future__ import annotations

import os
import stat

ENTRY_BYTES = 512  # counted for each name: a disk can also run out of names


class TooMuch(Exception):
    """More than is allowed."""


def size_bytes(directory: str, bound: int) -> int:
    """The disk space of a tree; stops above `bound`. A tree with paths too long for the system counts as above it."""
    total, seen, waiting = 0, set(), [directory]
    while waiting:
        try:
            entries = _entries(waiting.pop())
        except OSError:  # ENAMETOOLONG
            return bound + 1
        for entry in entries:
            try:
                found = entry.stat(follow_symlinks=False)
            except FileNotFoundError:
                continue
            except OSError:
                return bound + 1
            if stat.S_ISDIR(found.st_mode):
                waiting.append(entry.path)
            elif found.st_nlink > 1:
                if (found.st_dev, found.st_ino) in seen:
                    continue
                seen.add((found.st_dev, found.st_ino))
            total += found.st_blocks * 512 + ENTRY_BYTES
            if total > bound:
                return total
    return total


def copy_tree(source: str, target: str, bound: int) -> None:
    """Copy files, folders and links (as links) into the existing folder `target`. Pipes, sockets and devices are left out.
    Raises TooMuch above `bound` bytes."""
    if size_bytes(source, bound) > bound:
        raise TooMuch(f"{source} takes more than {bound:,} bytes")
    waiting = [(source, target)]
    while waiting:
        here, there = waiting.pop()
        for entry in _entries(here):
            to = os.path.join(there, entry.name)
            if entry.is_symlink():
                os.symlink(os.readlink(entry.path), to)
            elif entry.is_dir(follow_symlinks=False):
                os.mkdir(to, 0o700)
                waiting.append((entry.path, to))
            elif entry.is_file(follow_symlinks=False):
                _copy_file(entry.path, to)


def remove_tree(directory: str) -> None:
    """Remove a folder with its contents, however deep and whatever its permissions. Each inner folder is first moved next to
    `directory`, so that paths stay short. Does nothing if the folder does not exist."""
    moved, waiting = 0, [directory]
    while waiting:
        here = waiting.pop()
        for entry in _entries(here):
            if entry.is_dir(follow_symlinks=False):
                os.chmod(entry.path, 0o700)  # a folder without write permission cannot be moved
                moved += 1
                waiting.append(f"{directory}.{moved}")
                os.rename(entry.path, waiting[-1])
            else:
                os.unlink(entry.path)
        try:
            os.rmdir(here)
        except FileNotFoundError:
            pass


def write_file(directory: str, name: str, content: bytes) -> None:
    """Write a new file at a relative path, and the folders above it."""
    path = os.path.join(directory, name)
    os.makedirs(os.path.dirname(path), exist_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
    with open(descriptor, "wb") as file:
        file.write(content)


def _entries(directory: str) -> list[os.DirEntry[str]]:
    """The entries of a folder; none if it is gone. If its maker removed the permissions, they are set again."""
    try:
        with os.scandir(directory) as found:
            return list(found)
    except FileNotFoundError:
        return []
    except PermissionError:
        os.chmod(directory, 0o700)
        with os.scandir(directory) as found:
            return list(found)


def _copy_file(source: str, target: str) -> None:
    reading = os.open(source, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    with open(reading, "rb") as original:
        mode = stat.S_IMODE(os.fstat(reading).st_mode) & 0o777
        writing = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, mode | 0o600)
        with open(writing, "wb") as copy:
            while piece := original.read(1 << 20):
                copy.write(piece)

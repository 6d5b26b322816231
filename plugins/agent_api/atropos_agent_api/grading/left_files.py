"""Copy a work directory as a program left it, for a reward to read.

The program may have made anything: a pipe that never ends, a link to another episode's files, a million names. The copy has
directories, regular files, and links that stay inside; `LeftFiles` counts what was left out.
"""

from __future__ import annotations

import errno
import os
import stat
import time
from dataclasses import dataclass
from pathlib import Path

MOST_ENTRIES = 100_000
DEEPEST = 64  # directories inside one another
FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
LONGEST = 2048  # bytes of a path below the work directory, so that no copy of it reaches the system's own limit
PIECE = 1 << 20


class NotGradable(Exception):
    """The program left files that no reward can read. This is the program's fault, not the reward's."""


@dataclass
class LeftFiles:
    """The contents of a copy."""

    files: int = 0
    size_bytes: int = 0
    left_out: int = 0  # pipes, sockets, devices, links that lead outside or nowhere, unreadable files


def copy_left(source: Path, target: Path, most_bytes: int, within_s: float) -> LeftFiles:
    """Create `target` and fill it. Raises NotGradable if there is more than can be copied, or not enough time."""
    return Copy(source, target, most_bytes, time.monotonic() + within_s).run()


class Copy:
    def __init__(self, source: Path, target: Path, most_bytes: int, until: float) -> None:
        self._source = source
        self._target = target
        self._most_bytes = most_bytes
        self._until = until
        self._entries = 0
        self._found = LeftFiles()
        self._links: list[str] = []  # below the source
        self._made: set[tuple[int, int]] = set()  # device and inode of each file and folder of the copy

    def run(self) -> LeftFiles:
        waiting = [""]
        while waiting:
            folder = waiting.pop()
            self._make_folder(folder)
            try:
                at = self._opened(folder)
            except OSError as error:
                self._leave_out(error)
                continue
            try:
                for entry in self._listed(at, folder):
                    path = os.path.join(folder, entry.name)
                    if entry.is_symlink():
                        self._links.append(path)
                        os.symlink(os.readlink(entry.name, dir_fd=at), self._target / path)
                    elif entry.is_dir(follow_symlinks=False):
                        waiting.append(path)
                    else:
                        self._copy_file(at, entry.name, path)
            finally:
                os.close(at)
        self._remove_links()
        return self._found

    def _opened(self, folder: str) -> int:
        """Open the folder step by step without following links: it may have become a link since it was listed."""
        at = os.open(self._source, FOLDER)
        for name in filter(None, folder.split(os.sep)):
            above = at
            try:
                at = os.open(name, FOLDER, dir_fd=above)
            finally:
                os.close(above)
        return at

    def _leave_out(self, error: OSError) -> None:
        """Leave out what cannot be read. Raises errors that are the machine's fault, not the program's."""
        if error.errno in (errno.EMFILE, errno.ENFILE, errno.EIO):
            raise error
        self._found.left_out += 1

    def _make_folder(self, folder: str) -> None:
        there = self._target / folder
        os.mkdir(there, 0o700)
        self._add(os.stat(there))

    def _listed(self, at: int, folder: str) -> list[os.DirEntry[str]]:
        """The entries of a folder. Raises NotGradable if there are too many: memory may not hold all of their names."""
        listed: list[os.DirEntry[str]] = []
        if folder.count(os.sep) >= DEEPEST:
            raise NotGradable(f"it left more than {DEEPEST} folders inside one another")
        with os.scandir(at) as entries:
            for entry in entries:
                listed.append(entry)
                self._entries += 1
                self._check(os.path.join(folder, entry.name))
        return listed

    def _check(self, path: str) -> None:
        if self._entries > MOST_ENTRIES:
            raise NotGradable(f"it left more than {MOST_ENTRIES:,} files")
        if len(os.fsencode(path)) > LONGEST:
            raise NotGradable(f"it left a path of more than {LONGEST:,} bytes")
        if time.monotonic() > self._until:
            raise NotGradable("its files take too long to copy")

    def _copy_file(self, at: int, name: str, path: str) -> None:
        try:
            reading = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=at)  # does not wait for a pipe
        except OSError as error:
            self._leave_out(error)
            return
        with open(reading, "rb", buffering=0) as file:
            seen = os.fstat(reading)
            if not stat.S_ISREG(seen.st_mode):
                self._found.left_out += 1
                return
            self._found.size_bytes += seen.st_size
            if self._found.size_bytes > self._most_bytes:
                raise NotGradable(f"it left more than {self._most_bytes / 1e6:,.6g} MB, its limit of the disk")
            left = seen.st_size  # not more, even if the file grows
            with open(self._target / path, "xb") as copy:
                while left > 0 and (piece := file.read(min(PIECE, left))):
                    copy.write(piece)
                    left -= len(piece)
                    self._check(path)
                os.fchmod(copy.fileno(), 0o600 | (seen.st_mode & 0o100))
                self._add(os.fstat(copy.fileno()))
        self._found.files += 1

    def _remove_links(self) -> None:
        """Remove links, except those that lead to a file or folder of the copy. The kernel resolves each link, and gives up after 40
        steps."""
        for path in self._links:  # only after all are copied: one may lead through another
            self._check(path)
            try:
                end = os.stat(self._target / path)
                is_inside = (end.st_dev, end.st_ino) in self._made
            except OSError:  # it leads nowhere, or in circles
                is_inside = False
            if not is_inside:
                os.unlink(self._target / path)
                self._found.left_out += 1

    def _add(self, made: os.stat_result) -> None:
        self._made.add((made.st_dev, made.st_ino))

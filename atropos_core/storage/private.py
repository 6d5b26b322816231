"""What a run or a server keeps on disk is its user's alone, whatever the umask: prompts, replies, rewards, weights."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def make_private(directory: Path) -> None:
    """Make a directory that only this user may enter; one that is there is closed to others. Raises OSError where it cannot
    be, or where it is another user's, who could put anything there (root may use anybody's), or where a link in it is: what
    is written through that lands wherever that user wants."""
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = directory.stat()
    if found.st_uid != os.geteuid() and os.geteuid() != 0:
        raise PermissionError(
            errno.EPERM, f"it is of user {found.st_uid}, who could change what is in it", str(directory)
        )
    if found.st_mode & 0o077:
        directory.chmod(0o700)
    for entry in os.scandir(directory):
        if entry.is_symlink() and (owner := entry.stat(follow_symlinks=False).st_uid) not in (os.geteuid(), 0):
            raise PermissionError(
                errno.EPERM, f"user {owner} has put a link into it, {entry.name}: remove that", str(directory)
            )


@contextmanager
def private_files() -> Iterator[None]:
    """Whatever this process and those that it starts make meanwhile, only this user may read or write."""
    before = os.umask(0o077)
    try:
        yield
    finally:
        os.umask(before)

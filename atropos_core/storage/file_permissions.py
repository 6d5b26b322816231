"""Keep everything that a run or server writes private to its user, whatever the umask: prompts, replies, rewards, weights."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def make_private(directory: Path) -> None:
    """Make a directory that only this user may enter, or close an existing one to others. Raises OSError if that fails; if it
    belongs to another user, who could write anything into it (root may use any); and if it contains a link, through which
    writes would land elsewhere."""
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
    """Inside the block, files made by this process and its children can be read and written only by this user."""
    before = os.umask(0o077)
    try:
        yield
    finally:
        os.umask(before)

"""What reaches the disk, in the order of the system calls."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest


def watch_disk(patch: pytest.MonkeyPatch) -> list[tuple[str, Path, int]]:
    """Each sync of this process that has succeeded, with the file's size by then, and each renaming, with the new name."""
    calls: list[tuple[str, Path, int]] = []

    def watch_sync(real: Any) -> Any:
        def sync(descriptor: int) -> None:
            real(descriptor)
            calls.append(("sync", Path(os.readlink(f"/proc/self/fd/{descriptor}")), os.fstat(descriptor).st_size))

        return sync

    def watch_rename(real: Any) -> Any:
        def rename(old: Any, new: Any, **more: Any) -> None:
            real(old, new, **more)
            calls.append(("rename", Path(new), 0))

        return rename

    for name in ("fsync", "fdatasync"):
        patch.setattr(os, name, watch_sync(getattr(os, name)))
    for name in ("rename", "replace"):
        patch.setattr(os, name, watch_rename(getattr(os, name)))
    return calls

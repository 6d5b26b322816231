"""A disk that is soon full."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def mounted(where: Path, size: str) -> Iterator[Path]:
    """A tmpfs of this size. The test is skipped where this user may not mount one."""
    where.mkdir()
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(where)], capture_output=True
    ).returncode:
        pytest.skip("this user may not mount a small tmpfs, so a full disk cannot be made")
    try:
        yield where
    finally:
        subprocess.run(["umount", "-l", str(where)], check=True)  # also where something still has a file open

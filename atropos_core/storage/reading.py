"""Read files of a run directory, which may be damaged: a pipe in a file's place, half a line, numbers that no float holds."""

from __future__ import annotations

import errno
import json
import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

KINDS = {
    stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket", stat.S_IFCHR: "a device", stat.S_IFBLK: "a device",
    stat.S_IFDIR: "a directory",
}  # fmt: skip


def read_file(path: Path) -> bytes:
    """All of a regular file. Raises OSError, with `strerror` set; at once for a pipe, a device or a directory."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # the opening of a pipe waits otherwise
    except ValueError as error:  # a name with NUL
        raise OSError(errno.EINVAL, str(error), str(path)) from None
    with open(descriptor, "rb") as file:
        mode = os.fstat(descriptor).st_mode
        if not stat.S_ISREG(mode):
            raise OSError(errno.EINVAL, f"it is {KINDS.get(stat.S_IFMT(mode), 'no file')}", str(path))
        try:
            return file.read()
        except MemoryError:
            raise OSError(errno.ENOMEM, "it is larger than the memory of this machine", str(path)) from None


def read_text(path: Path) -> str:
    """The same as UTF-8, with or without a byte order mark. Raises OSError, and ValueError for other bytes."""
    return read_file(path).decode("utf-8-sig")


def parse_json(text: str | bytes) -> Any:
    """The value of a JSON text. Raises ValueError, also for one that is nested deeper than Python can go."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deep") from None


def numbered(folder: Path, prefix: str, suffix: str = "") -> list[tuple[int, Path]]:
    """Numbers and paths of what a run has named after its steps, like `step-000001.jsonl`, rising. Other names are left out."""
    name = re.compile(rf"{re.escape(prefix)}([0-9]{{6,18}}){re.escape(suffix)}")
    return sorted((int(found[1]), path) for path in _listed(folder) if (found := name.fullmatch(path.name)))


def _listed(folder: Path) -> Iterator[Path]:
    """Nothing where there is no such folder, or it cannot be read."""
    try:
        yield from folder.iterdir()
    except OSError:
        return

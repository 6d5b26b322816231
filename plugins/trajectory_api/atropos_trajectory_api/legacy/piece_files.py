"""Pieces of groups on the disk: a file for each, written once and removed when it is no longer needed.

Before pieces go into the hub as one group, their numbers are written down. So if the server is killed in the meantime, it neither
loses nor repeats a piece.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple
from zlib import crc32

from atropos_core import console
from atropos_core.errors import StoreFull
from atropos_core.storage.atomic import sync
from atropos_core.storage.file_permissions import make_private

_NAME = re.compile(r"(-?\d+)-(\d+)\.(piece|whole)")


class Found(NamedTuple):
    """One file: a piece, or the numbers of pieces that go into the hub together."""

    environment: int
    number: int
    is_piece: bool
    key: str
    body: bytes


class PieceFiles:
    """A directory of such files. `may_write`: returns False if the journal next to it needs the disk space."""

    def __init__(self, directory: Path, *, durable: bool, may_write: Callable[[], bool]) -> None:
        make_private(directory)
        self._may_write = may_write
        self._directory = directory
        self._durable = durable

    def read(self) -> Iterator[Found]:
        """Read all files in the order in which they were written. A file that cannot be read is reported and left in place."""
        found: list[Found] = []
        for path in self._directory.iterdir():
            if path.suffix == ".partial":
                path.unlink(missing_ok=True)
                continue
            try:
                found.append(_read(path))
            except (OSError, ValueError, KeyError, TypeError) as error:
                console.warn(
                    f"{path} is not a whole piece of a group ({error}): it is skipped. Whatever was in it is lost; "
                    "delete the file."
                )
        return iter(sorted(found, key=lambda one: one.number))

    def write(self, one: Found) -> None:
        """Write a file. Raises StoreFull, and then there is none."""
        path = self._path(one.environment, one.number, "piece" if one.is_piece else "whole")
        partial = path.with_suffix(".partial")
        head = json.dumps({"key": one.key, "crc": crc32(one.body)}).encode()
        try:
            if not self._may_write():
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            with partial.open("wb") as file:
                file.writelines((head, b"\n", one.body))
            if self._durable:
                sync(partial)
            os.replace(partial, path)
            if self._durable:
                sync(self._directory)
        except OSError as error:
            for left in (partial, path):
                with contextlib.suppress(OSError):
                    left.unlink()
            raise StoreFull(f"a piece of a group cannot be kept in {path}: {error.strerror}.") from error

    def remove(self, environment: int, numbers: Iterable[int]) -> None:
        for number in numbers:
            self._unlink(self._path(environment, number, "piece"))

    def begin(self, environment: int, numbers: Sequence[int], key: str) -> None:
        """Record that these pieces go into the hub as the group of that key. Raises StoreFull."""
        self.write(Found(environment, numbers[-1], False, key, json.dumps(numbers).encode()))

    def end(self, environment: int, number: int) -> None:
        self._unlink(self._path(environment, number, "whole"))

    def _path(self, environment: int, number: int, what: str) -> Path:
        return self._directory / f"{environment}-{number}.{what}"

    def _unlink(self, path: Path) -> None:
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            console.warn(
                f"{path} is no longer needed but cannot be removed ({error.strerror}): delete it before the next start."
            )


def _read(path: Path) -> Found:
    name = _NAME.fullmatch(path.name)
    if name is None:
        raise ValueError("it does not have the name of a piece's file")
    head, newline, body = path.read_bytes().partition(b"\n")
    if not newline:
        raise ValueError("it ends too early")
    header = json.loads(head)
    if header["crc"] != crc32(body):
        raise ValueError("its checksum is wrong")
    return Found(int(name[1]), int(name[2]), name[3] == "piece", str(header["key"]), body)

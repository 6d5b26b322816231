"""Pieces of groups on the disk: a file for each, written once and removed once it is over.

Before pieces go into the hub as one group it is written down which ones do, so that a server that is killed meanwhile
neither loses nor repeats any.
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
from atropos_core.storage.private import make_private

_NAME = re.compile(r"(-?\d+)-(\d+)\.(piece|whole)")


class Found(NamedTuple):
    """One file: a piece, or a list of the numbers of those that go into the hub together."""

    environment: int
    number: int
    is_piece: bool
    key: str
    body: bytes


class PieceFiles:
    """A directory of them. `may_write`: whether the journal beside it leaves room; it goes before."""

    def __init__(self, directory: Path, *, durable: bool, may_write: Callable[[], bool]) -> None:
        make_private(directory)
        self._may_write = may_write
        self._directory = directory
        self._durable = durable

    def read(self) -> Iterator[Found]:
        """All, in the order in which they were written. What cannot be read is named and left where it is."""
        found: list[Found] = []
        for path in self._directory.iterdir():
            if path.suffix == ".partial":
                path.unlink(missing_ok=True)
                continue
            try:
                found.append(_read(path))
            except (OSError, ValueError, KeyError, TypeError) as error:
                console.warn(
                    f"{path} is not a whole piece of a group ({error}): it is passed over. Whatever was in it is lost; "
                    "delete the file."
                )
        return iter(sorted(found, key=lambda one: one.number))

    def write(self, one: Found) -> None:
        """Raises StoreFull, and then there is none."""
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
        """These go into the hub as the group of that key. Raises StoreFull."""
        self.write(Found(environment, numbers[-1], False, key, json.dumps(numbers).encode()))

    def end(self, environment: int, number: int) -> None:
        self._unlink(self._path(environment, number, "whole"))

    def _path(self, environment: int, number: int, what: str) -> Path:
        return self._directory / f"{environment}-{number}.{what}"

    def _unlink(self, path: Path) -> None:
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            console.warn(f"{path} is over and cannot be removed ({error.strerror}): delete it before the next start.")


def _read(path: Path) -> Found:
    name = _NAME.fullmatch(path.name)
    if name is None:
        raise ValueError("no file of this name is written here")
    head, newline, body = path.read_bytes().partition(b"\n")
    if not newline:
        raise ValueError("it ends too early")
    header = json.loads(head)
    if header["crc"] != crc32(body):
        raise ValueError("its checksum is wrong")
    return Found(int(name[1]), int(name[2]), name[3] == "piece", str(header["key"]), body)

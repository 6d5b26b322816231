"""The journal of one model: each accepted request and each result, in one file that survives `kill -9`.

A record is written with one `write` before its request is acknowledged. If the process was killed while it wrote, the unfinished
record at the end is cut off when the journal is opened again: it was not acknowledged. Nothing waits for the disk, so a power cut
may lose the last seconds.
"""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Iterable
from enum import IntEnum
from pathlib import Path
from typing import NamedTuple

from atropos_core.errors import RunDirectoryError, StoreFull

MAGIC = b"ATRTNKR1"
_HEAD = struct.Struct("<IIqI")  # checksum of the rest, kind, sequence id, length of the body


class Kind(IntEnum):
    """The kind of a record."""

    CREATE = 1  # requests; their bodies are what the client sent
    FORWARD_BACKWARD = 2
    OPTIM_STEP = 3
    SAVE_WEIGHTS = 4
    SAVE_FOR_SAMPLER = 5
    LOAD_WEIGHTS = 6
    REFUSED = 7  # accepted to keep the order, and answered with the error that is its body
    DONE_JSON = 16  # results
    DONE_PROTOBUF = 17
    FAILED = 18

    @property
    def is_result(self) -> bool:
        return self >= Kind.DONE_JSON


class Entry(NamedTuple):
    """The place of a record in the file."""

    kind: Kind
    seq: int
    offset: int  # of the body
    size: int


class Journal:
    """The open journal in one file. Raises StoreFull when the disk refuses a record, of which nothing is then left."""

    def __init__(self, path: Path) -> None:
        """Open or make the journal. Raises RunDirectoryError."""
        self.path = path
        try:
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise RunDirectoryError(f"the journal {path} cannot be opened: {error.strerror}.") from error
        self._end = 0
        self.entries = self._read()

    def append(self, kind: Kind, seq: int, body: bytes) -> Entry:
        """Write a record."""
        rest = struct.pack("<IqI", kind, seq, len(body)) + body
        whole = struct.pack("<I", zlib.crc32(rest)) + rest
        self._write(whole)
        entry = Entry(kind, seq, self._end + _HEAD.size, len(body))
        self._end += len(whole)
        return entry

    def body(self, entry: Entry) -> bytes:
        return os.pread(self._file, entry.size, entry.offset)

    @property
    def size_bytes(self) -> int:
        return self._end

    def rewrite(self, entries: Iterable[Entry]) -> list[Entry]:
        """Keep only these records, and return their new places. If the disk has no room for the shorter file, nothing changes."""
        kept = list(entries)
        shorter = self.path.with_suffix(".partial")
        shorter.unlink(missing_ok=True)
        made = Journal(shorter)
        try:
            found = [made.append(entry.kind, entry.seq, self.body(entry)) for entry in kept]
            shorter.replace(self.path)
        except (OSError, StoreFull):
            made.close()
            shorter.unlink(missing_ok=True)
            return kept
        os.close(self._file)
        self._file, self._end = made._file, made._end
        return found

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _write(self, data: bytes) -> None:
        written = 0
        try:
            while written < len(data):
                written += os.pwrite(self._file, data[written:], self._end + written)
        except OSError as error:
            os.ftruncate(self._file, self._end)
            raise StoreFull(
                f"the journal {self.path} could not take a request of {len(data) / 1e6:.1f} MB: {error.strerror}.",
                remedy="Free some space; the client sends the request again.",
            ) from None

    def _read(self) -> list[Entry]:
        """Return the records in the file, and cut off what comes after the last whole one."""
        size = os.fstat(self._file).st_size
        if size < len(MAGIC):
            os.ftruncate(self._file, 0)
            self._write(MAGIC)
            self._end = len(MAGIC)
            return []
        if os.pread(self._file, len(MAGIC), 0) != MAGIC:
            raise RunDirectoryError(f"{self.path} is not a journal of `atropos tinker`.")
        found, at = [], len(MAGIC)
        while (entry := self._entry(at, size)) is not None:
            found.append(entry)
            at = entry.offset + entry.size
        os.ftruncate(self._file, at)
        self._end = at
        return found

    def _entry(self, at: int, size: int) -> Entry | None:
        head = os.pread(self._file, _HEAD.size, at)
        if len(head) < _HEAD.size:
            return None
        crc, kind, seq, length = _HEAD.unpack(head)
        if at + _HEAD.size + length > size or kind not in set(Kind):
            return None
        body = os.pread(self._file, length, at + _HEAD.size)
        if zlib.crc32(head[4:] + body) != crc:
            return None
        return Entry(Kind(kind), seq, at + _HEAD.size, length)

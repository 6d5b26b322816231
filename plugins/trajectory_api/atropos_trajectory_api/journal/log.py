"""An append-only log of records in segment files. It survives `kill -9`, and a power cut as far as `sync` says.

A segment begins with a random salt, and the checksums of its records begin from that salt, so data from a client can never pass for
a record. A record is written with one `writev` before it is acknowledged. If a process was killed while writing, the incomplete record
at the end is cut off when the journal is opened. A record that was damaged later is reported, and reading continues after it.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import mmap
import os
import struct
import tempfile
import threading
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, NamedTuple

from atropos_core import console
from atropos_core.errors import DataError, RunDirectoryError, StoreFull
from atropos_core.storage import atomic as durable
from atropos_core.storage.file_permissions import make_private

Sync = Literal[
    "always", "second", "never"
]  # when appended data is also safe from a power cut. always: once `written` has
# returned, and the rest within about a second; second: everything within about a second; never: when the kernel decides
SEGMENT_BYTES = 64 << 20
RESERVE_BYTES = 256 << 10  # used on a full disk, so that records that free space can still be written; refilled first

_SEGMENT = struct.Struct("<8sQ")  # magic, salt
_SEGMENT_MAGIC = b"ATRJRNL1"
_HEAD = struct.Struct("<4sII")  # magic, kind, length of the body; followed by a checksum of these and the body
_CRC = struct.Struct("<I")
_MAGIC = b"\xa7rec"
_HEAD_BYTES = _HEAD.size + _CRC.size


class RecordPosition(NamedTuple):
    """The position of a record's body."""

    segment: int
    offset: int
    length: int


class _Segment:
    """One file. `size` is the end of its last whole record; `filled` is the part of it that counts towards its capacity."""

    def __init__(self, path: Path, descriptor: int, salt: int, size: int) -> None:
        self.path = path
        self.descriptor = descriptor
        self.salt = salt & 0xFFFFFFFF
        self.size = self.filled = size


class Journal:
    """The open journal of one directory, locked against other processes."""

    def __init__(self, directory: Path, *, segment_bytes: int = SEGMENT_BYTES, sync: Sync = "second") -> None:
        self.directory = directory
        self.segment_bytes = segment_bytes
        self.segments: dict[int, _Segment] = {}  # in order; the last is written to
        self.size_bytes = 0  # of all segments
        self._sync = sync
        self._has_reserve = False
        self._syncing = threading.Lock()  # one sync at a time: the second must find the disk as the first left it
        self._lock = threading.Lock()  # for the next three, and for closing what they name
        self._dirty: set[int] = set()
        self._new_segment = False  # True if its name is not on the disk yet
        self._doomed: list[_Segment] = []  # to delete once the data in the others is on the disk
        self._flushing = asyncio.Lock()
        self._appended = self._flushed = 0
        self._stop = threading.Event()
        self._held = _lock(directory)
        self._syncer: threading.Thread | None = None
        for path in sorted(directory.glob("*.journal")):
            self._open(path)
        if sync != "never":
            self._syncer = threading.Thread(target=self._sync_every_second, name="journal", daemon=True)
            self._syncer.start()

    # -- writing

    def append(
        self, kind: int, *parts: bytes | memoryview, urgent: bool = False, copied: bool = False
    ) -> RecordPosition:
        """Append a record, which is written when this returns. Raises StoreFull if it could not be, with nothing left of it. An
        `urgent` record, which must be small, may use the reserve of a full disk. A record `copied` from a segment that is dropped
        does not fill its new one; otherwise a few segments of copies would be copied again and again."""
        number = next(reversed(self.segments))
        segment = self.segments[number]
        length = sum(map(len, parts))
        head = _HEAD.pack(_MAGIC, kind, length)
        crc = zlib.crc32(head, segment.salt)
        for part in parts:
            crc = zlib.crc32(part, crc)
        self._write_at_last(segment, [head + _CRC.pack(crc), *parts], _HEAD_BYTES + length, urgent)
        place = RecordPosition(number, segment.size + _HEAD_BYTES, length)
        segment.size += _HEAD_BYTES + length
        segment.filled += 0 if copied else _HEAD_BYTES + length
        self.size_bytes += _HEAD_BYTES + length
        self._appended += 1
        if self._sync != "never":
            with self._lock:
                self._dirty.add(segment.descriptor)
        return place

    @property
    def is_due(self) -> bool:
        """True if the current segment is full."""
        return not self.segments or next(reversed(self.segments.values())).filled >= self.segment_bytes

    def roll(self, *, urgent: bool = False) -> None:
        """Continue in a new segment. Raises StoreFull."""
        number = next(reversed(self.segments), 0) + 1
        path = self.directory / f"{number:012d}.journal"
        salt = int.from_bytes(os.urandom(8), "little")
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise self._full(error) from None
        segment = _Segment(path, descriptor, salt, 0)
        try:
            self._write_at_last(segment, [_SEGMENT.pack(_SEGMENT_MAGIC, salt)], _SEGMENT.size, urgent)
        except StoreFull:
            os.close(descriptor)
            path.unlink()
            raise
        segment.size = segment.filled = _SEGMENT.size
        self.size_bytes += segment.size
        self.segments[number] = segment
        with self._lock:
            self._new_segment = True

    def unroll(self) -> None:
        """Undo the last roll, after which nothing was appended."""
        _, segment = self.segments.popitem()
        self.size_bytes -= segment.size
        _delete([segment])

    def drop_first(self) -> None:
        """Let go of the oldest segment. It is deleted once the data in the others is on the disk: within a second, or when its
        space is needed. This call does not wait for that: syncing 64 MB takes 50 to 100 ms."""
        segment = self.segments.pop(next(iter(self.segments)))
        self.size_bytes -= segment.size
        with self._lock:
            self._dirty.discard(segment.descriptor)
            self._doomed.append(segment)
        if self._sync == "never":
            self._delete_doomed()

    async def written(self) -> None:
        """Return once everything that was appended before is as safe as `sync` promises."""
        if self._sync != "always":
            return
        upto = self._appended
        async with self._flushing:
            if self._flushed < upto:
                latest = self._appended
                await asyncio.to_thread(self.sync)
                self._flushed = latest

    def sync(self) -> None:
        """Return once everything is on the disk. Raises StoreFull if the disk refuses it."""
        copies: list[int] = []
        with self._syncing:
            with self._lock:
                dirty, has_new, doomed = self._dirty, self._new_segment, self._doomed
                self._dirty, self._new_segment, self._doomed = set(), False, []
            try:
                copies.extend(map(os.dup, dirty))
                if has_new:
                    durable.sync(self.directory)
                for copy in copies:
                    os.fdatasync(copy)
            except OSError as error:
                with self._lock:
                    self._dirty |= dirty & {segment.descriptor for segment in list(self.segments.values())}
                    self._new_segment |= has_new
                    self._doomed[:0] = doomed
                raise StoreFull(
                    f"the journal in {self.directory} could not be synced to the disk: {error.strerror}."
                ) from None
            finally:
                for copy in copies:
                    os.close(copy)
            _delete(doomed)

    def has_room(self, size_bytes: int) -> bool:
        """True if a record of that size could be appended now, in addition to the reserve."""
        if not self.fill_reserve():
            return False
        try:
            with tempfile.TemporaryFile(dir=self.directory) as file:
                os.posix_fallocate(file.fileno(), 0, size_bytes + _HEAD_BYTES)
        except OSError:
            return False
        return True

    def close(self) -> None:
        if self._held < 0:
            return
        self._stop.set()
        if self._syncer:
            self._syncer.join()
        try:
            if self._sync != "never":
                self.sync()
        finally:
            for segment in (*self.segments.values(), *self._doomed):
                os.close(segment.descriptor)
            os.close(self._held)
            self._held = -1

    def _write_at_last(self, segment: _Segment, buffers: list[bytes | memoryview], total: int, urgent: bool) -> None:
        """Write the record. If needed, use the space of segments that are to be deleted, and for urgent records the reserve."""
        while True:
            try:
                if not urgent and not self.fill_reserve():
                    raise self._full(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
                return self._write(segment, buffers, total)
            except StoreFull:
                if not (self._delete_doomed() or (urgent and self._use_reserve())):
                    raise

    def _write(self, segment: _Segment, buffers: list[bytes | memoryview], total: int) -> None:
        """Write all of it or nothing."""
        try:
            done = os.writev(segment.descriptor, buffers)
            if done < total:
                rest = memoryview(b"".join(buffers))
                while done < total:
                    done += os.write(segment.descriptor, rest[done:])
        except OSError as error:
            os.ftruncate(segment.descriptor, segment.size)
            raise self._full(error) from None

    def _full(self, error: OSError) -> StoreFull:
        return StoreFull(
            f"the journal in {self.directory} cannot be written: {error.strerror}.",
            remedy="Free space on that disk. What was acknowledged is safe, and work continues once there is space.",
        )

    def _delete_doomed(self) -> bool:
        with self._lock:
            doomed = list(self._doomed)
        if not doomed:
            return False
        if self._sync != "never":
            self.sync()
        else:
            self._doomed.clear()
            _delete(doomed)
        return True

    def _use_reserve(self) -> bool:
        if not self._has_reserve:
            return False
        self._has_reserve = False
        os.truncate(self.directory / "reserve", 0)
        return True

    def fill_reserve(self) -> bool:
        """True if the reserve exists. While it does not, only urgent records may use space on this disk."""
        if not self._has_reserve:
            path = self.directory / "reserve"
            try:
                path.write_bytes(bytes(RESERVE_BYTES))
                self._has_reserve = True
            except OSError:
                path.unlink(missing_ok=True)
        return self._has_reserve

    def _sync_every_second(self) -> None:
        said = ""
        while not self._stop.wait(1.0):
            if self._sync == "always" and not (self._dirty or self._doomed):
                continue  # a caller of `written` syncs on its own
            try:
                self.sync()
                said = ""
            except (StoreFull, OSError) as error:
                if str(error) != said:
                    with contextlib.suppress(OSError):  # a warning may also need a file descriptor
                        console.warn(f"{error} Trying again every second.")
                        said = str(error)

    # -- reading

    def read(self, place: RecordPosition) -> bytes:
        """The body of a record, checked again. Raises DataError if it is damaged."""
        segment = self.segments.get(place.segment)
        if segment is not None:
            found = os.pread(segment.descriptor, _HEAD_BYTES + place.length, place.offset - _HEAD_BYTES)
            if _is_whole(memoryview(found), 0, len(found), segment.salt):
                return found[_HEAD_BYTES:]
        raise DataError(
            f"the record at byte {place.offset} of segment {place.segment} of the journal in {self.directory} is damaged."
        )

    def replay(self) -> Iterator[tuple[int, RecordPosition, memoryview]]:
        """Kind, position and body of every whole record, oldest first. A body is only valid until the next step. Use this up before
        anything is appended: it also cuts off an incomplete record at the end."""
        for number, segment in self.segments.items():
            is_last = number == next(reversed(self.segments))
            with mmap.mmap(segment.descriptor, 0, access=mmap.ACCESS_READ) as mapped, memoryview(mapped) as data:
                at, end = _SEGMENT.size, len(data)
                while at < end:
                    if _is_whole(data, at, end, segment.salt):
                        _, kind, length = _HEAD.unpack_from(data, at)
                        start = at + _HEAD_BYTES
                        with data[start : start + length] as body:
                            yield kind, RecordPosition(number, start, length), body
                        at = start + length
                        continue
                    found = self._next_whole(mapped, data, at + 1, segment.salt)
                    if found is None and is_last:
                        console.warn(f"{segment.path}: {end - at} bytes at the end were incomplete, and are cut off")
                        self.size_bytes -= end - at
                        segment.size = at
                        break
                    lost = (found or end) - at
                    console.warn(
                        f"{segment.path}: {lost} bytes from byte {at} on are damaged; groups in them are lost, and "
                        "groups that they settled may be served again"
                    )
                    at = found or end
            if is_last:
                os.ftruncate(segment.descriptor, segment.size)
        self.fill_reserve()

    def _next_whole(self, mapped: mmap.mmap, data: memoryview, start: int, salt: int) -> int | None:
        while (at := mapped.find(_MAGIC, start)) >= 0:
            if _is_whole(data, at, len(data), salt):
                return at
            start = at + 1
        return None

    def _open(self, path: Path) -> None:
        descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CLOEXEC)
        head = os.pread(descriptor, _SEGMENT.size, 0)
        if len(head) < _SEGMENT.size:  # killed between creating the file and its first write
            os.close(descriptor)
            path.unlink()
            return
        magic, salt = _SEGMENT.unpack(head)
        if magic != _SEGMENT_MAGIC:
            os.close(descriptor)
            raise DataError(
                f"{path} is not a journal segment that this version can read.",
                remedy="Move the directory away, or serve from another one (--dir).",
            )
        segment = _Segment(path, descriptor, salt, os.fstat(descriptor).st_size)
        self.segments[int(path.stem)] = segment
        self.size_bytes += segment.size


def _is_whole(data: memoryview, at: int, end: int, salt: int) -> bool:
    if at + _HEAD_BYTES > end:
        return False
    magic, _, length = _HEAD.unpack_from(data, at)
    if magic != _MAGIC or at + _HEAD_BYTES + length > end:
        return False
    (crc,) = _CRC.unpack_from(data, at + _HEAD.size)
    with data[at : at + _HEAD.size] as head, data[at + _HEAD_BYTES : at + _HEAD_BYTES + length] as body:
        return bool(zlib.crc32(body, zlib.crc32(head, salt)) == crc)


def _delete(segments: list[_Segment]) -> None:
    for segment in segments:
        os.close(segment.descriptor)
        segment.path.unlink()


def _lock(directory: Path) -> int:
    """Lock the directory for one process: two would write into each other's records."""
    try:
        make_private(directory)
        descriptor = os.open(directory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise RunDirectoryError(f"the journal directory {directory} cannot be used: {error.strerror}.") from None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        owner = os.pread(descriptor, 32, 0).decode(errors="replace").strip() or "unknown"
        os.close(descriptor)
        raise RunDirectoryError(
            f"the journal directory {directory} is in use by process {owner}.",
            remedy="Stop that server first, or give this one its own directory (--dir).",
        ) from None
    try:
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, str(os.getpid()).encode(), 0)
    except OSError:  # a full disk: the lock works without its owner's name
        pass
    return descriptor

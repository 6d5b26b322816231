"""A segment of shared memory, cut into slots: one process writes messages into it, another reads them in place.

The segment is a memfd: it has no name, so nothing is left when both processes have gone, however they ended. It is sealed against
shrinking, because reading a page that has been cut off would kill the reader with SIGBUS.

    slot = header (64 bytes) | payload | key | meta          the payload begins at a multiple of 64, as arrays like it

A slot is written in this order: the header is made void, the payload is copied, the header is filled in, and its last field,
`committed`, is set to the message's number. A reader that finds anything else was notified of a slot that was never finished, and
refuses it. It reads a slot only after a doorbell has arrived over a socket; that system call orders the memory of the two processes
on every architecture.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import struct
import zlib
from collections.abc import Sequence

from atropos_core.codec import Buffer
from atropos_core.errors import DataError

MAGIC = b"ATRS"
LAYOUT = 1
HEADER_BYTES = 64
_HEADER = struct.Struct("<4sHHQQII I4x")  # magic, layout, has a checksum, number, payload, key and meta bytes, crc32
_COMMITTED = struct.Struct("<Q")
_COMMITTED_AT = HEADER_BYTES - _COMMITTED.size
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW


class Slots:
    """`count` slots of `slot_bytes` each, for payload, key and meta together. Pages that were never written take no memory."""

    def __init__(self, memory: mmap.mmap, count: int, slot_bytes: int) -> None:
        self.count = count
        self.slot_bytes = slot_bytes
        self._stride = HEADER_BYTES + slot_bytes
        self._memory = memory
        self._view = memoryview(memory)

    @classmethod
    def create(cls, count: int, slot_bytes: int) -> tuple[Slots, int]:
        """Make a segment. Return it with its descriptor, which the caller passes on and closes."""
        if count < 1 or slot_bytes < 1:
            raise DataError(f"{count} slots of {slot_bytes} bytes: both must be at least 1")
        slot_bytes += -slot_bytes % HEADER_BYTES
        size = count * (HEADER_BYTES + slot_bytes)
        descriptor = os.memfd_create("atropos-ring", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(descriptor, size)
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
            return cls(mmap.mmap(descriptor, size), count, slot_bytes), descriptor
        except BaseException:
            os.close(descriptor)
            raise

    @classmethod
    def attach(cls, descriptor: int, count: int, slot_bytes: int) -> Slots:
        """Open another process's segment, read-only. Raises DataError if the descriptor is not as announced."""
        size = count * (HEADER_BYTES + slot_bytes)
        try:
            sealed = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & _SEALS == _SEALS
        except OSError:
            sealed = False  # not a memfd
        if not sealed or os.fstat(descriptor).st_size != size or count < 1 or slot_bytes < 1:
            raise DataError(
                f"the descriptor passed for {count} slots of {slot_bytes} bytes is not a sealed segment of that size"
            )
        return cls(mmap.mmap(descriptor, size, prot=mmap.PROT_READ), count, slot_bytes)

    def write(
        self, slot: int, number: int, buffers: Sequence[Buffer], sizes: Sequence[int], key: bytes, meta: bytes,
        checksum: bool = False,
    ) -> None:  # fmt: skip
        """Copy a message into a slot that no reader holds, and commit it. `sizes` are those of `buffers`, in bytes."""
        memory, start = self._memory, slot * self._stride
        _COMMITTED.pack_into(memory, start + _COMMITTED_AT, 0)
        at = begin = start + HEADER_BYTES
        for buffer, size in zip(buffers, sizes, strict=True):
            memory[at : at + size] = buffer
            at += size
        payload_bytes = at - begin
        if key or meta:
            memory[at : at + len(key) + len(meta)] = key + meta
        crc = zlib.crc32(self._view[begin:at]) if checksum else 0
        _HEADER.pack_into(memory, start, MAGIC, LAYOUT, checksum, number, payload_bytes, len(key), len(meta), crc)
        _COMMITTED.pack_into(memory, start + _COMMITTED_AT, number)

    def read(self, slot: int, number: int) -> tuple[memoryview, bytes, bytes]:
        """Return payload (in place), key and meta of message `number`. Raises DataError if the slot does not hold all of it."""
        if not 0 <= slot < self.count:
            raise DataError(f"message {number} was announced in slot {slot} of {self.count}")
        start = slot * self._stride
        magic, layout, checksum, found, size, key, meta, crc = _HEADER.unpack_from(self._view, start)
        (committed,) = _COMMITTED.unpack_from(self._view, start + _COMMITTED_AT)
        if magic != MAGIC or layout != LAYOUT or not found == committed == number:
            raise DataError(
                f"slot {slot} does not hold message {number}: layout {layout}, number {found}, committed {committed}"
            )
        if size + key + meta > self.slot_bytes:
            raise DataError(f"message {number} claims {size + key + meta} bytes in a slot of {self.slot_bytes}")
        begin = start + HEADER_BYTES
        end = begin + size
        payload = self._view[begin:end]
        if checksum and zlib.crc32(payload) != crc:
            raise DataError(f"message {number} is torn: its checksum does not match")
        if key or meta:
            tail = bytes(self._view[end : end + key + meta])
            return payload, tail[:key], tail[key:]
        return payload, b"", b""

    def close(self) -> None:
        """Release the memory; if payloads are still viewed, it is freed with the last view."""
        memory: mmap.mmap | None = vars(self).pop("_memory", None)
        if memory is not None:
            self._view.release()
            try:
                memory.close()
            except BufferError:
                pass

"""The encoding of protocol buffers (protobuf.dev/programming-guides/encoding): fields in, fields out.

The protocol has a dozen small messages. Reading them here needs no generated code, no dependency, and every malformed body is one
DataError.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from atropos_core.errors import DataError

VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5
_VARINT_BYTES = 10
_SIGN = 1 << 63
_DOUBLE = struct.Struct("<d")


class Field(NamedTuple):
    """One field of a message. `data` is the content of BYTES, FIXED64 and FIXED32; `number` the value of a VARINT."""

    tag: int
    kind: int
    number: int
    data: memoryview

    def integer(self) -> int:
        """Return a signed integer (int32, int64, bool, enum)."""
        self._expect(VARINT, "an integer")
        return self.number - (1 << 64) if self.number & _SIGN else self.number

    def double(self) -> float:
        self._expect(FIXED64, "a double")
        return float(_DOUBLE.unpack(self.data)[0])

    def content(self) -> memoryview:
        """Return the bytes of a message or of a bytes field."""
        self._expect(BYTES, "bytes")
        return self.data

    def text(self, most: int = 1024) -> str:
        """Return a string of at most `most` bytes."""
        data = self.content()
        if len(data) > most:
            raise DataError(f"a text of the message has {len(data)} bytes, more than {most}.")
        try:
            return str(data, "utf-8")
        except UnicodeDecodeError:
            raise DataError("a text of the message is not UTF-8.") from None

    def integers(self) -> list[int]:
        """Return the values of a repeated integer, packed, or a single one."""
        if self.kind == VARINT:
            return [self.integer()]
        data, at, found = self.content(), 0, []
        while at < len(data):
            value, at = _varint(data, at)
            found.append(value - (1 << 64) if value & _SIGN else value)
        return found

    def _expect(self, kind: int, what: str) -> None:
        if self.kind != kind:
            raise DataError(f"field {self.tag} of the message is not {what}.")


def fields(data: memoryview) -> Iterator[Field]:
    """Yield the fields of a message in order. Raises DataError if it is not one."""
    at, end, nothing = 0, len(data), data[:0]
    while at < end:
        key, at = _varint(data, at)
        tag, kind = key >> 3, key & 7
        if tag == 0:
            raise DataError("the message has a field with the number 0.")
        if kind == VARINT:
            value, at = _varint(data, at)
            yield Field(tag, kind, value, nothing)
            continue
        if kind == BYTES:
            size, at = _varint(data, at)
        elif kind in (FIXED64, FIXED32):
            size = 8 if kind == FIXED64 else 4
        else:
            raise DataError(f"field {tag} of the message has the unknown wire type {kind}.")
        if size > end - at:
            raise DataError(f"field {tag} of the message ends beyond its message.")
        yield Field(tag, kind, 0, data[at : at + size])
        at += size


def _varint(data: memoryview, at: int) -> tuple[int, int]:
    """Return the unsigned 64-bit integer that begins at `at`, and the position after it."""
    value = 0
    for index in range(_VARINT_BYTES):
        if at + index >= len(data):
            raise DataError("the message ends inside a number.")
        byte = data[at + index]
        value |= (byte & 0x7F) << (7 * index)
        if byte < 0x80:
            return value & ((1 << 64) - 1), at + index + 1
    raise DataError("the message has a number of more than 64 bits.")


def varint(value: int) -> bytes:
    """Encode an integer; a negative one as two's complement of 64 bits."""
    value &= (1 << 64) - 1
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def integer(tag: int, value: int) -> bytes:
    return varint(tag << 3 | VARINT) + varint(value)


def double(tag: int, value: float) -> bytes:
    return varint(tag << 3 | FIXED64) + _DOUBLE.pack(value)


def content(tag: int, data: bytes | str) -> bytes:
    """Encode a message, bytes or a string."""
    data = data.encode() if isinstance(data, str) else data
    return varint(tag << 3 | BYTES) + varint(len(data)) + data


def packed(tag: int, values: Iterable[int]) -> bytes:
    """Encode a repeated integer."""
    return content(tag, b"".join(map(varint, values)))

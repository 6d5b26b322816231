"""Encode the changes in a stretch of numbers as bytes: positions and new values.

Positions are gaps between neighbours that changed. Gaps and values are split into planes (the first byte of each, the second, ...) and
each plane is coded by DEFLATE without a search for repetitions (Huffman codes and runs, RFC 1951): gaps of evenly strewn changes are
geometric, for which a prefix code is within some per cent of the entropy, and the high bytes of weights are few. Measured on updates of
the tiny policy it gives 1 to 8 % fewer bytes than zstd, at 30 to 110 MB/s for each core.
"""

from __future__ import annotations

import math
import zlib
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from atropos_core.errors import DataError

BLOCK = 1 << 22  # elements of a tensor that are coded together
_TRIED = 1 << 16  # bytes of a plane that tell whether the rest is worth coding
_WORTH = 0.97
_WHOLE = 63 / 64  # of the elements: from there on all of them travel, which costs 1.6 % more at most
_WIDTHS = (1, 2, 4)
_MEMORY = 9  # the most that zlib takes: longer stretches with one code

Bits = NDArray[np.signedinteger]


def changed_bytes(elements: int, changed: int, size: int) -> float:
    """The least that `changed` of `elements` elements of `size` bytes take, if every choice of positions is as likely as any other and
    values cannot be compressed: log2 C(n, k) / 8 + k * size (the enumerative code of Cover, IEEE Trans. Inf. Theory 19, 1973)."""
    ways = math.lgamma(elements + 1) - math.lgamma(changed + 1) - math.lgamma(elements - changed + 1)
    return ways / math.log(2) / 8 + changed * size


@dataclass(frozen=True)
class Changes:
    """The changes of one block: positions (None: all) and values."""

    positions: NDArray[np.int64] | None  # [K], rising
    values: Bits  # [K]


def encode(old: Bits, new: Bits) -> tuple[int, bytes]:
    """Return how many of these n elements differ, and the bytes that turn `old` into `new` (empty if nothing differs). Bit patterns
    are compared, so that -0.0 and every NaN count as what they are."""
    positions = np.flatnonzero(old != new)
    count = len(positions)
    if not count:
        return 0, b""
    if count >= _WHOLE * len(new):
        return count, encode_whole(new)
    gaps = np.diff(positions, prepend=-1) - 1
    width = next(width for width in _WIDTHS if gaps.max() < 1 << 8 * width)
    parts = [bytes([width]), varint(count), *_planes(gaps.astype(f"<u{width}")), *_planes(new[positions])]
    return count, b"".join(parts)


def encode_whole(new: Bits) -> bytes:
    return b"".join([b"\0", varint(len(new)), *_planes(new)])


def decode(data: memoryview, elements: int, size: int) -> Changes:
    """Decode a block of `elements` elements of `size` bytes. Raises DataError for bytes that `encode` cannot have made."""
    reader = Reader(data)
    width, count = reader.byte(), reader.varint()
    if width not in (0, *_WIDTHS) or not 0 < count <= elements or (width == 0 and count != elements):
        raise DataError(f"a block of {elements} elements says {count} changes by gaps of {width} bytes")
    positions = None
    if width:
        gaps = _unplaned(reader, count, width).view(f"<u{width}")
        positions = np.cumsum(gaps.astype(np.int64) + 1) - 1
        if positions[-1] >= elements:
            raise DataError(f"a block of {elements} elements says a change at {positions[-1]}")
    return Changes(positions, _unplaned(reader, count, size).view(f"<i{size}"))


def varint(number: int) -> bytes:
    """Seven bits a byte, the lowest first."""
    out = bytearray()
    while number > 127:
        out.append(number & 127 | 128)
        number >>= 7
    return bytes([*out, number])


class Reader:
    """Read bytes from the front. Raises DataError if there are too few."""

    def __init__(self, data: memoryview) -> None:
        self._data = data
        self.at = 0

    def take(self, count: int) -> memoryview:
        taken = self._data[self.at : self.at + count]
        if len(taken) != count:
            raise DataError(f"{count} bytes are to follow, and {len(taken)} do")
        self.at += count
        return taken

    def byte(self) -> int:
        return self.take(1)[0]

    def varint(self) -> int:
        number = shift = 0
        while True:
            byte = self.byte()
            number |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return number
            if shift > 63:
                raise DataError("a number has more than 64 bits")


def _planes(numbers: NDArray[np.generic]) -> list[bytes]:
    planes = numbers.view(np.uint8).reshape(len(numbers), -1).T
    return [part for plane in planes for part in _plane(plane.tobytes())]


def _plane(plane: bytes) -> tuple[bytes, bytes]:
    """Return the length, with a bit that is set if the plane is coded, and the plane."""
    if len(plane) > _TRIED and len(_deflate(plane[:_TRIED])) > _WORTH * _TRIED:
        return varint(2 * len(plane)), plane
    coded = _deflate(plane)
    return (varint(2 * len(coded) + 1), coded) if len(coded) < len(plane) else (varint(2 * len(plane)), plane)


def _deflate(plane: bytes) -> bytes:
    coder = zlib.compressobj(1, zlib.DEFLATED, -zlib.MAX_WBITS, _MEMORY, zlib.Z_RLE)
    return coder.compress(plane) + coder.flush()


def _unplaned(reader: Reader, count: int, size: int) -> NDArray[np.uint8]:
    planes = np.empty((size, count), np.uint8)
    for plane in planes:
        length = reader.varint()
        stored = reader.take(length >> 1)
        try:
            raw = zlib.decompressobj(-zlib.MAX_WBITS).decompress(stored, count + 1) if length & 1 else stored
        except zlib.error as error:
            raise DataError(f"a plane cannot be decoded: {error}") from error
        if len(raw) != count:
            raise DataError(f"a plane of {count} bytes has {len(raw)}")
        plane[:] = np.frombuffer(raw, np.uint8)
    return np.ascontiguousarray(planes.T).reshape(-1)

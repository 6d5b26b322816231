"""The header of a GGUF file: its metadata and the table of its tensors. No tensor is read.

The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. Every count is held against the size of the file before it is
followed, so that a damaged or hostile file ends with an error, not with a loop or all memory.
"""

from __future__ import annotations

import math
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

MAGIC = b"GGUF"
VERSIONS = (2, 3)
STRING, ARRAY = 8, 9
SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
MOST_DIMENSIONS = 8


class Unreadable(ValueError):
    """A file is not GGUF, is damaged or ends too early. The text says which."""


@dataclass(frozen=True)
class Tensor:
    name: str
    shape: tuple[int, ...]  # as torch has it, the last dimension varies fastest
    kind: int  # a number of ggml's types
    offset: int

    @property
    def elements(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class Header:
    metadata: Mapping[str, Any]  # an array is only its length, for tokenizers have a hundred thousand entries
    tensors: tuple[Tensor, ...]
    data_start: int
    size_bytes: int

    def missing_bytes(self, blocks: Mapping[int, tuple[int, int]]) -> int:
        """Return how many bytes of tensors the file lacks at its end. `blocks`: elements and bytes of a block, for each type."""
        end = self.data_start
        for tensor in self.tensors:
            elements, width = blocks[tensor.kind]
            end = max(end, self.data_start + tensor.offset + -(-tensor.elements // elements) * width)
        return max(0, end - self.size_bytes)


def read_header(path: Path) -> Header:
    """Raises Unreadable, and OSError."""
    with path.open("rb") as file:
        reader = _Reader(file)
        if (begin := file.read(4)) != MAGIC:
            raise Unreadable(f"it starts with {begin!r}, not with {MAGIC!r}")
        version = reader.scalar("<I")
        if version not in VERSIONS:
            swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
            kind = "for machines of the other byte order" if swapped in VERSIONS else f"of version {version}"
            raise Unreadable(f"it is GGUF {kind}, and only versions 2 and 3 are read, in little-endian order")
        tensors, pairs = reader.scalar("<Q"), reader.scalar("<Q")
        metadata: dict[str, Any] = {}
        for _ in range(reader.count(pairs, 13)):
            key = reader.text()
            metadata[key] = reader.value(reader.scalar("<I"))
        table = tuple(reader.tensor() for _ in range(reader.count(tensors, 24)))
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1:
            raise Unreadable(f"its tensors are said to be aligned to {alignment!r} bytes")
        start = -(-file.tell() // alignment) * alignment
        return Header(metadata, table, start, reader.size_bytes)


class _Reader:
    def __init__(self, file: IO[bytes]) -> None:
        self.file, self.size_bytes = file, os.fstat(file.fileno()).st_size

    def count(self, count: int, smallest_bytes: int) -> int:
        left = self.size_bytes - self.file.tell()
        if count * smallest_bytes > left:
            raise Unreadable(
                f"its header announces {count:,} entries at byte {self.file.tell():,} of {self.size_bytes:,}: it is cut off or damaged"
            )
        return count

    def scalar(self, form: str) -> Any:  # the number's type depends on `form`
        width = struct.calcsize(form)
        self.count(1, width)
        return struct.unpack(form, self.file.read(width))[0]

    def text(self) -> str:
        length = self.count(self.scalar("<Q"), 1)
        try:
            return self.file.read(length).decode()
        except UnicodeDecodeError:
            raise Unreadable(f"a text of its header, before byte {self.file.tell():,}, is not UTF-8") from None

    def value(self, kind: int) -> Any:  # of metadata: anything
        if kind in SCALARS:
            return self.scalar(SCALARS[kind])
        if kind == STRING:
            return self.text()
        if kind != ARRAY:
            raise Unreadable(f"its header has a value of type {kind}, which GGUF does not define")
        of, length = self.scalar("<I"), self.scalar("<Q")
        if of in SCALARS:
            width = struct.calcsize(SCALARS[of])
            self.file.seek(self.count(length, width) * width, os.SEEK_CUR)
        elif of == STRING:
            for _ in range(self.count(length, 8)):
                self.file.seek(self.count(self.scalar("<Q"), 1), os.SEEK_CUR)
        else:
            raise Unreadable(f"its header has an array of type {of}, which no known file has")
        return length

    def tensor(self) -> Tensor:
        name, dimensions = self.text(), self.scalar("<I")
        if dimensions > MOST_DIMENSIONS:
            raise Unreadable(f"its tensor {name!r:.100} has {dimensions:,} dimensions")
        shape = tuple(self.scalar("<Q") for _ in range(dimensions))
        return Tensor(name, shape[::-1], self.scalar("<I"), self.scalar("<Q"))

"""An update as a file: which blocks of which tensors changed, and what they are now.

It begins with MAGIC, then block by block: the tensor's number in the list that both ends have, the block's number in it, the length of
what follows (varints), and the block as `coding` writes it. Blocks that are not in the file stay as they are. The file names no version:
its digest is checked before its first byte is used, and the two ends agree separately on which weights it is for.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from typing import BinaryIO

import torch
from torch import Tensor

from atropos_bridge_delta import coding
from atropos_bridge_delta.coding import BLOCK, Reader, changed_bytes, varint
from atropos_core.errors import DataError

MAGIC = b"atropos delta 1\n"
_READ = 1 << 20
_NUMBERS = 32  # bytes that three varints and a length take at most


class Writer:
    """Writes one update, with its digest as it goes."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._digest = hashlib.blake2b(digest_size=16)
        self.size_bytes = 0
        self.changed = 0  # elements
        self.least_bytes = 0.0  # that these changes take (`coding.changed_bytes`)
        self._put(MAGIC)

    def changes(self, number: int, old: Tensor, new: Tensor) -> None:
        """Write what turns the bits `old` [N] into `new` [N], both on the CPU. Afterwards `old` equals `new`."""
        changed = 0
        for block, begin in enumerate(range(0, len(new), BLOCK)):
            before, now = old[begin : begin + BLOCK], new[begin : begin + BLOCK]
            count, coded = coding.encode(before.numpy(), now.numpy())
            if count:
                self._block(number, block, coded)
                before.copy_(now)
                changed += count
        if changed:
            self.changed += changed
            self.least_bytes += changed_bytes(len(new), changed, new.element_size())

    def whole(self, number: int, new: Tensor) -> None:
        for block, begin in enumerate(range(0, len(new), BLOCK)):
            self._block(number, block, coding.encode_whole(new[begin : begin + BLOCK].numpy()))
        self.changed += len(new)
        self.least_bytes += len(new) * new.element_size()

    def digest(self) -> str:
        return self._digest.hexdigest()

    def _block(self, number: int, block: int, coded: bytes) -> None:
        self._put(varint(number) + varint(block) + varint(len(coded)))
        self._put(coded)

    def _put(self, data: bytes) -> None:
        self._file.write(data)
        self._digest.update(data)
        self.size_bytes += len(data)


def digest_of(file: BinaryIO) -> tuple[int, str]:
    """Bytes of an update, and their digest."""
    found, size = hashlib.blake2b(digest_size=16), 0
    file.seek(0)
    while piece := file.read(_READ):
        found.update(piece)
        size += len(piece)
    return size, found.hexdigest()


def apply(file: BinaryIO, all_bits: Sequence[Tensor]) -> None:
    """Write what changed into these tensors [N] of bits. Raises DataError for bytes that no Writer has written. Some tensors may have
    changed by then: check the digest first."""
    for number, block, coded in _blocks(file):
        if number >= len(all_bits) or block * BLOCK >= len(all_bits[number]):
            raise DataError(f"an update has block {block} of tensor {number}, and there is none")
        part = all_bits[number][block * BLOCK : (block + 1) * BLOCK]
        found = coding.decode(coded, len(part), part.element_size())
        values = torch.from_numpy(found.values).to(part.device)
        if found.positions is None:
            part.copy_(values)
        else:
            part[torch.from_numpy(found.positions).to(part.device)] = values


def _blocks(file: BinaryIO) -> Iterator[tuple[int, int, memoryview]]:
    file.seek(0)
    if file.read(len(MAGIC)) != MAGIC:
        raise DataError("this is no update of bridge 'delta', or one of another release")
    while head := file.read(_NUMBERS):
        reader = Reader(memoryview(head))
        number, block, length = reader.varint(), reader.varint(), reader.varint()
        file.seek(reader.at - len(head), 1)
        coded = file.read(length)
        if len(coded) != length:
            raise DataError(f"an update ends within a block of {length} bytes")
        yield number, block, memoryview(coded)

"""Read two files of tensors next to each other, in any of the formats that a checkpoint has."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from atropos_core.errors import DataError

# numpy has no bfloat16 and no float8: their bits are shown as whole numbers, which still tells equal from unequal
BITS = {"BF16": np.uint16, "F8_E4M3": np.uint8, "F8_E5M2": np.uint8}
TYPES = {
    "F64": np.float64, "F32": np.float32, "F16": np.float16, "I64": np.int64, "I32": np.int32, "I16": np.int16, "I8": np.int8,
    "U8": np.uint8, "BOOL": np.bool_, **BITS,
}  # fmt: skip


def tensor_names(path: Path) -> set[str]:
    """Return the names of the tensors in a file. Raises DataError."""
    if path.suffix == ".npy":
        return {path.stem}
    try:
        return set(_Tensors(path).names)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path} cannot be read: {type(error).__name__}: {error}.") from error


def shared_tensors(first: Path, second: Path) -> Iterator[tuple[str, NDArray[Any], NDArray[Any]]]:
    """Yield the tensors that two files both have, in the order of the first: safetensors, or .npy with one array. Raises DataError."""
    try:
        if first.suffix == ".npy":
            yield first.stem, np.load(first), np.load(second)
            return
        one, other = _Tensors(first), _Tensors(second)
        for name in one.names:
            if name in other.names:
                yield name, one.read(name), other.read(name)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{first} or {second} cannot be read: {type(error).__name__}: {error}.") from error


class _Tensors:
    """A safetensors file: 8 bytes with the size of its header, the header as JSON, then the bytes of the tensors."""

    def __init__(self, path: Path) -> None:
        self._bytes = np.memmap(path, np.uint8, "r")
        size = int.from_bytes(self._bytes[:8].tobytes(), "little")
        header = json.loads(self._bytes[8 : 8 + size].tobytes())
        self._start = 8 + size
        self.names = {name: entry for name, entry in header.items() if name != "__metadata__"}

    def read(self, name: str) -> NDArray[Any]:
        entry = self.names[name]
        begin, end = (self._start + int(at) for at in entry["data_offsets"])
        if entry["dtype"] not in TYPES:
            raise ValueError(f"{name} has the type {entry['dtype']}, which is not known here")
        values: NDArray[Any] = np.frombuffer(self._bytes[begin:end].tobytes(), TYPES[entry["dtype"]])
        shaped: NDArray[Any] = values.reshape(entry["shape"])
        if entry["dtype"] == "BF16":  # its bits are the upper half of a float32's
            return (shaped.astype(np.uint32) << 16).view(np.float32)
        return shaped

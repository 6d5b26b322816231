"""Records <-> bytes: how anything crosses a process boundary here.

A frame is a JSON header and raw buffers. The header mirrors the value; arrays and bytes in it are references into the
buffers, records are tagged with their class name. No pickle: what arrives can only be one of the records below, a
container, a number, text or an array. A million tokens cost 9.4 MB and 1.6 ms this way, 37.5 MB and 1.2 s as JSON lists.

An array whose entries are all one value is that value in the header and a read-only view of it when decoded; one that is
there several times is written once; flags are written as bits. So a short frame can stand for long arrays: how long, is
bounded at both ends.
"""

from __future__ import annotations

import dataclasses
import json
import math
import struct
from operator import attrgetter
from pathlib import PurePath
from typing import Any, TypeAlias

import numpy as np

from atropos_core import interfaces, types
from atropos_core.errors import DataError

MAGIC = b"ATR1"
MAX_IMPLIED_BYTES = 1 << 28  # of arrays that a frame stands for and does not hold
_PREFIX = struct.Struct("<4sIQ")  # magic, header bytes, body bytes
PREFIX_BYTES = _PREFIX.size
_ALIGN = 8
_PADDING = [bytes(-length % _ALIGN) for length in range(_ALIGN)]
_SHORT_BYTES = 64  # an array up to here is written as it is: looking at it costs more than it saves

Buffer: TypeAlias = bytes | bytearray | memoryview

_RECORDS: dict[str, type[Any]] = {
    record.__name__: record
    for record in (
        types.Sampling, types.Task, types.Draw, types.Completion, types.TopK, types.Rollout, types.Episode, types.Failed,
        types.ScoredGroup, types.Column, types.Ragged, types.Batch, interfaces.ModelInfo,
    )
}  # fmt: skip
_FIELDS = {
    record: attrgetter(*(field.name for field in dataclasses.fields(record))) for record in _RECORDS.values()
}  # none has fewer than two, so each gives a tuple
_PLAIN = frozenset({type(None), bool, int, float, str})
_KINDS = frozenset("biuf")  # bool, signed, unsigned, float: nothing that holds pointers
_WORDS = {size: np.dtype(f"<u{size}") for size in (1, 2, 4, 8)}
_HEADER = json.JSONEncoder(separators=(",", ":"), check_circular=False)


def encode(value: Any) -> list[Buffer]:
    """The buffers of one frame, in order, for a scatter-gather write. Raises DataError for what has no encoding."""
    body: list[Buffer] = []
    size = implied = 0
    written: dict[int, tuple[Any, dict[str, Any]]] = {}  # holds each array, so that no other gets its id

    def put(raw: Buffer, length: int) -> int:
        nonlocal size
        start = size
        body.append(raw)
        if padding := _PADDING[length % _ALIGN]:
            body.append(padding)
        size += length + len(padding)
        return start

    def put_array(item: np.ndarray[Any, Any]) -> dict[str, Any]:
        nonlocal implied
        dtype, length = item.dtype, item.nbytes
        if dtype.kind not in _KINDS:
            raise DataError(f"an array of dtype {dtype} has no encoding")
        made: dict[str, Any]
        if length > _SHORT_BYTES:
            spare = implied + length <= MAX_IMPLIED_BYTES
            if spare and (known := written.get(id(item))):
                implied += length
                return known[1]
            if spare and (only := _only_value(item)) is not None:
                implied += length
                return {"~c": [dtype.str, list(item.shape), only]}
            if dtype.kind == "b":
                bits = np.packbits(item)
                made = {"~p": [list(item.shape), put(bits.data, bits.nbytes)]}
            else:
                made = {"~a": [dtype.str, list(item.shape), put(np.ascontiguousarray(item).data.cast("B"), length)]}
            written[id(item)] = item, made
            return made
        return {"~a": [dtype.str, list(item.shape), put(item.tobytes(), length)]}

    def walk(item: Any) -> Any:
        kind = type(item)
        if kind in _PLAIN:
            return item
        if kind is np.ndarray:
            return put_array(item)
        if fields := _FIELDS.get(kind):
            return {"~r": kind.__name__, "~f": [walk(entry) for entry in fields(item)]}
        if kind is list:
            return [walk(entry) for entry in item]
        if kind is tuple:
            return {"~t": [walk(entry) for entry in item]}
        if kind is dict or hasattr(item, "keys"):
            if not all(isinstance(key, str) for key in item):
                raise DataError("a mapping whose keys are not all text has no encoding")
            plain = {key: walk(item[key]) for key in item}
            return {"~d": plain} if any(key.startswith("~") for key in plain) else plain
        return other(item)

    def other(item: Any) -> Any:
        if isinstance(item, np.ndarray):
            return put_array(item.view(np.ndarray))
        if isinstance(item, np.generic):
            return item.item()
        if isinstance(item, tuple):
            return {"~t": [walk(entry) for entry in item]}
        if isinstance(item, list):
            return [walk(entry) for entry in item]
        if isinstance(item, (bytes, bytearray, memoryview)):
            length = memoryview(item).nbytes
            return {"~b": [length, put(item, length)]}
        if isinstance(item, PurePath):
            return str(item)
        raise DataError(f"a {type(item).__module__}.{type(item).__name__} has no encoding")

    header = _HEADER.encode(walk(value)).encode()
    return [_PREFIX.pack(MAGIC, len(header), size), header, *body]


def encode_bytes(value: Any) -> bytes:
    return b"".join(encode(value))


def framed(header: bytes, *body: Buffer) -> bytes:
    """A frame whose header was written by hand: where a record is written often and always looks the same."""
    return b"".join((_PREFIX.pack(MAGIC, len(header), sum(map(len, body))), header, *body))


def frame_size(prefix: Buffer) -> int:
    """Bytes that follow the first PREFIX_BYTES of a frame. Raises DataError where these are not a frame's."""
    magic, header, body = _PREFIX.unpack_from(prefix)
    if magic != MAGIC:
        raise DataError(f"not a frame of this program: it begins with {bytes(magic)!r}")
    return int(header) + int(body)


def decode(frame: Buffer, *, most_bytes: int | None = None) -> Any:
    """The value of one whole frame. Arrays are views of `frame` (read-only where it is). Raises DataError, also where its
    arrays would hold more than `most_bytes`."""
    view = memoryview(frame)
    if len(view) < PREFIX_BYTES or len(view) != PREFIX_BYTES + frame_size(view):
        raise DataError(f"a frame of {len(view)} bytes is cut short or too long")
    _, header_bytes, _ = _PREFIX.unpack_from(view)
    body = view[PREFIX_BYTES + header_bytes :]
    left = most_bytes if most_bytes is not None else 8 * len(body) + MAX_IMPLIED_BYTES  # a bit may stand for a byte

    def array(tag: str, item: Any) -> np.ndarray[Any, Any]:
        nonlocal left
        dtype, shape, at = item if tag != "~p" else ("|b1", *item)
        kind = np.dtype(dtype)
        if kind.kind not in _KINDS:
            raise DataError(f"an array of dtype {dtype} is refused")
        if shape and min(shape) < 0:
            raise DataError(f"an array of shape {shape} is refused")
        count = math.prod(shape)
        left -= count * kind.itemsize
        if left < 0:
            raise DataError(f"a frame of {len(view)} bytes that stands for arrays this long is refused")
        if not count:
            return np.empty(shape, kind)
        if tag == "~c":
            return np.ndarray(shape, kind, at.to_bytes(kind.itemsize, "little"), strides=(0,) * len(shape))
        if tag == "~p":
            bits = np.frombuffer(body, np.uint8, count=(count + 7) // 8, offset=at)
            return np.unpackbits(bits, count=count).view(np.bool_).reshape(shape)
        flat = np.frombuffer(body, kind, count=count, offset=at)
        return flat if len(shape) == 1 else flat.reshape(shape)

    def walk(item: Any) -> Any:
        kind = type(item)
        if kind is list:
            return [walk(entry) for entry in item]
        if kind is not dict or not item:
            return item
        tag = next(iter(item))
        if tag[:1] != "~":
            return {key: walk(entry) for key, entry in item.items()}
        if tag in ("~a", "~c", "~p"):
            return array(tag, item[tag])
        if tag == "~r":
            record = _RECORDS.get(item["~r"])
            if record is None:
                raise DataError(f"an unknown record {item['~r']!r}")
            return record(*[walk(entry) for entry in item["~f"]])
        if tag == "~t":
            return tuple([walk(entry) for entry in item["~t"]])
        if tag == "~d":
            return {key: walk(entry) for key, entry in item["~d"].items()}
        if tag == "~b":
            length, start = item["~b"]
            if not 0 <= start <= start + length <= len(body):
                raise DataError(f"{length} bytes at {start} of a body of {len(body)} are refused")
            return bytes(body[start : start + length])
        raise DataError(f"an unknown mark {tag!r}")

    try:
        return walk(json.loads(bytes(view[PREFIX_BYTES : PREFIX_BYTES + header_bytes])))
    except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError, MemoryError) as error:
        raise DataError(f"a frame that cannot be read: {error}") from error


def _only_value(item: np.ndarray[Any, Any]) -> int | None:
    """The bits that every entry has, or None where they differ. Bits: 0.0 is not -0.0, and nan is itself."""
    word = _WORDS.get(item.dtype.itemsize)
    if word is None or not item.ndim:
        return None
    bits = item.view(word)
    first = bits[(0,) * item.ndim]
    if first != bits[(-1,) * item.ndim] or not (bits == first).all():
        return None
    return int(first)

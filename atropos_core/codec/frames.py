"""Records <-> bytes: how data crosses process boundaries.

A frame is a JSON header and raw buffers. The header mirrors the value; arrays and bytes in it are references into the buffers,
and records are tagged with their class name. There is no pickle: a frame can only contain the records below, containers, numbers,
text and arrays. A million tokens cost 9.4 MB and 1.6 ms this way, 37.5 MB and 1.2 s as JSON lists.

An array with only one value is stored as that value in the header, and decoded as a read-only view. An array that occurs several
times is written once. Flags are written as bits. So a short frame can stand for long arrays; both ends limit how long. A scored
group is written as its columns (`atropos_core.codec.columns`).
"""

from __future__ import annotations

import dataclasses
import json
import math
import struct
from collections.abc import Callable, Sequence
from operator import attrgetter
from pathlib import PurePath
from typing import Any, TypeAlias

import numpy as np

from atropos_core import interfaces, stepwise, types
from atropos_core.codec.columns import GroupColumns, by_rollout
from atropos_core.errors import DataError

MAGIC = b"ATR1"
MAX_IMPLIED_BYTES = 1 << 28  # of arrays that a frame stands for and does not hold
PREFIX = struct.Struct("<4sIQ")  # magic, header bytes, body bytes
PREFIX_BYTES = PREFIX.size
_ALIGN = 8
_PADDING = [bytes(-length % _ALIGN) for length in range(_ALIGN)]
_SHORT_BYTES = 64  # an array up to here is written as it is: looking at it costs more than it saves

Buffer: TypeAlias = bytes | bytearray | memoryview

RECORDS: dict[str, type[Any]] = {
    record.__name__: record
    for record in (
        types.Sampling, types.Task, types.Draw, types.Completion, types.TopK, types.Kept, types.RoutedExperts, types.TurnRewards,
        types.Rollout, types.Episode, types.Failed, types.ScoredGroup, types.Column, types.Ragged, types.Batch, interfaces.ModelInfo,
        stepwise.AdapterSettings, stepwise.TargetSequence, stepwise.AdamSettings, stepwise.StepwiseOutput,
    )
}  # fmt: skip
# Last fields with their defaults. They are left out if all that follow have their defaults, since older ends do not know them.
OPTIONAL: dict[type[Any], dict[str, Any]] = {
    types.Sampling: {"stop_ids": (), "stop": (), "min_p": 0.0},
    types.Completion: {"kept": None, "experts": None},
    types.Rollout: {"kept": None, "experts": None, "turns": None, "turn_order": None},
    GroupColumns: {"kept": None, "experts": None, "turns": None, "turn_order": None},
}
_FIELDS = {
    record: attrgetter(*(field.name for field in dataclasses.fields(record))) for record in RECORDS.values()
}  # none has fewer than two, so each gives a tuple
_COLUMNS = attrgetter(*(field.name for field in dataclasses.fields(GroupColumns)))
_PLACES = {field.name: place for place, field in enumerate(dataclasses.fields(GroupColumns))}
_DRAW, _SAMPLED, _TRAINED, _VERSIONS = (_PLACES[name] for name in ("draw", "sampled", "trained", "policy_version"))
_IMPLIED = {
    _PLACES[name]: np.dtype(dtype)
    for name, dtype in (
        ("tokens", "<i4"), ("sampled", "?"), ("trained", "?"), ("logprobs", "<f4"), ("rewards", "<f4"),
    )
}  # fmt: skip
_REPEATED = [_PLACES[name] for name in ("rollouts", "temperature", "truncated", "sft", "correct", "finish")]
_PLAIN = frozenset({type(None), bool, int, float, str})
_KINDS = frozenset("biuf")  # bool, signed, unsigned, float: nothing that holds pointers
_WORDS = {size: np.dtype(f"<u{size}") for size in (1, 2, 4, 8)}
_HEADER = json.JSONEncoder(separators=(",", ":"), check_circular=False)


def encode(value: Any) -> list[Buffer]:
    """Return the buffers of one frame, in order, for a scatter-gather write. Raises DataError for a value without an encoding."""
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

    def put_columns(columns: GroupColumns) -> list[Any]:
        """Encode columns. An array of the expected type and length is stored as its offset. `trained` None: as `sampled`. Versions as
        a list: one for each rollout. A list of one entry: all are equal to it."""
        values = list(_COLUMNS(columns))
        alike = values[_TRAINED] is values[_SAMPLED]
        if (versions := by_rollout(columns.policy_version, columns.lengths)) is not None:
            values[_VERSIONS] = versions.tolist()
        for place in _REPEATED:
            values[place] = _once(values[place])
        if len(columns.tokens):
            for place, dtype in _IMPLIED.items():
                values[place] = put_implied(values[place], dtype)
        if alike:
            values[_TRAINED] = None
        values[_DRAW] = list(_FIELDS[types.Draw](columns.draw))
        return [walk(value) for value in values[: _count(values, OPTIONAL[GroupColumns])]]

    def put_implied(item: Any, dtype: np.dtype[Any]) -> Any:
        if type(item) is not np.ndarray or item.dtype != dtype or item.ndim != 1:
            return item
        raw = np.packbits(item) if dtype.kind == "b" else np.ascontiguousarray(item)
        return put(raw.data.cast("B"), raw.nbytes)

    def walk(item: Any) -> Any:
        kind = type(item)
        if kind in _PLAIN:
            return item
        if kind is np.ndarray:
            return put_array(item)
        if kind is types.ScoredGroup and (columns := GroupColumns.of(item)) is not None:
            return {"~g": put_columns(columns)}
        if fields := _FIELDS.get(kind):
            entries = fields(item)
            if kind in OPTIONAL:
                entries = entries[: _count(entries, OPTIONAL[kind])]
            return {"~r": kind.__name__, "~f": [walk(entry) for entry in entries]}
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
    return [PREFIX.pack(MAGIC, len(header), size), header, *body]


def encode_bytes(value: Any) -> bytes:
    return b"".join(encode(value))


def framed(header: bytes, *body: Buffer) -> bytes:
    """Return a frame with a header that was written by hand, for a record that is written often and always looks the same."""
    return b"".join((PREFIX.pack(MAGIC, len(header), sum(map(len, body))), header, *body))


def frame_size(prefix: Buffer) -> int:
    """Return the number of bytes after the first PREFIX_BYTES of a frame. Raises DataError if these are not a frame's."""
    magic, header, body = PREFIX.unpack_from(prefix)
    if magic != MAGIC:
        raise DataError(f"not a frame of this program: it begins with {bytes(magic)!r}")
    return int(header) + int(body)


def decode(frame: Buffer, *, most_bytes: int | None = None, loads: Callable[[str], Any] = json.loads) -> Any:
    """Decode one whole frame. Arrays are views of `frame` (read-only if it is). Raises DataError, also if its arrays would hold more
    than `most_bytes`. `loads` parses the header, which is JSON, and may raise what `json.loads` does, or DataError."""
    view = memoryview(frame)
    if len(view) < PREFIX_BYTES or len(view) != PREFIX_BYTES + frame_size(view):
        raise DataError(f"a frame of {len(view)} bytes is cut short or too long")
    _, header_bytes, _ = PREFIX.unpack_from(view)
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

    def columns(fields: list[Any]) -> Any:
        nonlocal left
        (
            draw, task, rollouts, lengths, tokens, sampled, trained, versions, logprobs, advantages, reference, lacking,
            temperature, truncated, sft, teachers, scores, correct, finish, details, rewards, parts, failed, given, wire,
            *optional,
        ) = fields  # fmt: skip
        if len(optional) > len(OPTIONAL[GroupColumns]):
            raise DataError(f"a group of {len(fields)} columns is refused")
        sequences, episodes, total = len(lengths), len(scores), sum(lengths)
        left -= 14 * total  # of the columns that nearly every group has, in bytes a token
        if left < 0 or min(lengths) < 0:
            raise DataError(f"a frame of {len(view)} bytes that stands for arrays this long is refused")

        def flags(at: Any) -> Any:
            if type(at) is not int:
                return walk(at)
            bits = np.frombuffer(body, np.uint8, (total + 7) // 8, at)
            return np.unpackbits(bits, count=total).view(np.bool_)

        implied = (
            {type(tokens), type(sampled), type(logprobs), type(rewards)} == {int}
            and type(versions) is list
            and (trained is None or type(trained) is int)
        )
        chosen = flags(sampled)
        made = GroupColumns(
            types.Draw(*draw), walk(task), _many(rollouts, episodes), _many(lengths, sequences),
            np.frombuffer(body, np.int32, total, tokens) if type(tokens) is int else walk(tokens), chosen,
            chosen if trained is None else flags(trained),
            by_token(versions, lengths, total) if type(versions) is list else walk(versions),
            np.frombuffer(body, np.float32, total, logprobs) if type(logprobs) is int else walk(logprobs),
            None if advantages is None else walk(advantages), None if reference is None else walk(reference), lacking,
            _many(temperature, sequences), _many(truncated, sequences), _many(sft, sequences),
            None if teachers is None else _many(walk(teachers), sequences), _many(scores, episodes), _many(correct, episodes),
            _many(finish, episodes), None if details is None else _many(walk(details), episodes),
            np.frombuffer(body, np.float32, episodes, rewards) if type(rewards) is int else walk(rewards),
            walk(parts) if parts else parts, walk(failed), given and walk(given), walk(wire) if wire else wire,
            *(None if more is None else _many(walk(more), sequences) for more in optional),
        )  # fmt: skip
        if lacking != {}:
            for absent in lacking.values():
                _many(absent, sequences)
        if not (
            implied
            and advantages is None
            and reference is None
            and details is None
            and teachers is None
            and not optional
        ):
            made.refuse_other_types()
        return made.group()

    def by_token(values: list[int], lengths: list[int], total: int) -> np.ndarray[Any, Any]:
        if {*map(type, values), *map(type, lengths)} != {int} or len(values) != len(lengths):
            raise DataError("policy versions must be whole numbers, one for each rollout")
        if total and values.count(values[0]) == len(values):
            return np.ndarray(total, np.int32, values[0].to_bytes(4, "little", signed=True), strides=(0,))
        return np.repeat(np.array(values, np.int32), lengths)

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
            record = RECORDS.get(item["~r"])
            if record is None:
                raise DataError(f"an unknown record {item['~r']!r}")
            return record(*[walk(entry) for entry in item["~f"]])
        if tag == "~g":
            return columns(item["~g"])
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
        header = str(view[PREFIX_BYTES : PREFIX_BYTES + header_bytes], "utf-8", "surrogatepass")
        return walk(loads(header))
    except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError, MemoryError) as error:
        raise DataError(f"a frame that cannot be read: {error}") from error


def _count(entries: Sequence[Any], optional: dict[str, Any]) -> int:
    """Return how many entries are written: without the last ones that have their default."""
    count = len(entries)
    for default in reversed(optional.values()):
        if entries[count - 1] is not default and entries[count - 1] != default:
            return count
        count -= 1
    return count


def _once(values: list[Any]) -> list[Any]:
    """Return a list of one entry if all entries are equal."""
    first = values[0]
    if len(values) > 1 and values.count(first) == len(values) and {*map(repr, values)} == {repr(first)}:
        return [first]
    return values


def _many(values: list[Any], count: int) -> list[Any]:
    """Undo `_once`."""
    if type(values) is not list or len(values) not in (1, count):
        raise DataError(f"a group with {count} of something has a list of other length")
    return values if len(values) == count else values * count


def _only_value(item: np.ndarray[Any, Any]) -> int | None:
    """Return the bits that every entry has, or None if they differ. Comparing bits: 0.0 is not -0.0, and nan equals itself."""
    word = _WORDS.get(item.dtype.itemsize)
    if word is None or not item.ndim:
        return None
    bits = item.view(word)
    first = bits[(0,) * item.ndim]
    if first != bits[(-1,) * item.ndim] or not (bits == first).all():
        return None
    return int(first)

"""Lists by sequence -> flat columns. What is not of its type raises one of `NOT_OF_ITS_TYPE`: it may still be coerced.
What no coercion mends raises DataError, with the field and the index."""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, NoReturn

import numpy as np

from atropos_core.errors import DataError
from atropos_core.types import Bools, Floats, Tokens

NOT_OF_ITS_TYPE = (TypeError, OverflowError, struct.error)


def ints(rows: Sequence[Sequence[Any]]) -> Tokens:
    """Integers of 32 bits as they are, nothing else, row after row. 8,192 of them take 53 us; numpy, which takes
    anything, 107."""
    return _packed("i", rows, np.dtype(np.int32))


def floats(rows: Sequence[Sequence[Any]]) -> Floats:
    """Numbers. What is beyond 32 bits becomes infinite."""
    return _packed("f", rows, np.dtype(np.float32))


def _packed(code: str, rows: Sequence[Any], dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    if any(type(row) is np.ndarray for row in rows):
        return np.concatenate([_cast(row, dtype) for row in rows])
    return np.frombuffer(b"".join([_packer(len(row), code)(*row) for row in rows]), dtype)


def _cast(row: Any, dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    if type(row) is not np.ndarray:
        return np.frombuffer(_packer(len(row), dtype.char)(*row), dtype)
    if row.dtype.kind == "f" and dtype.kind == "i":
        raise TypeError
    with np.errstate(over="ignore"):
        cast: np.ndarray[Any, Any] = row.astype(dtype)
    if dtype.kind == "f" and not np.isfinite(cast).all():
        raise OverflowError
    return cast


@lru_cache(4096)
def _packer(count: int, code: str) -> Callable[..., bytes]:
    return struct.Struct(f"{count}{code}").pack


def types_of(rows: Any) -> set[type]:
    return set(map(type, rows))


def lists(rows: Any) -> list[list[Any]]:
    if type(rows) is not list or types_of(rows) - {list, np.ndarray}:
        raise TypeError
    return rows


def counted(name: str, rows: Any, sequences: int) -> list[Any]:
    if type(rows) is not list:
        raise TypeError
    if len(rows) != sequences:
        raise DataError(f"{name}: there are {len(rows)}, for {sequences} sequences of tokens")
    return rows


def by_token(name: str, rows: Any, lengths: Sequence[int]) -> list[list[Any]]:
    """The same rows, where each has as many entries as its sequence has tokens."""
    counts = list(map(len, lists(counted(name, rows, len(lengths)))))
    if counts != lengths:
        number = next(number for number, count in enumerate(counts) if count != lengths[number])
        raise DataError(f"{name}[{number}]: {counts[number]} entries, for {lengths[number]} tokens")
    return list(rows)


# -- errors that name the place


def path_of(location: Sequence[str | int]) -> str:
    return "".join(f"[{step}]" if isinstance(step, int) else step for step in location) or "the group"


def index_of(at: np.ndarray[Any, Any] | None, place: int) -> str:
    if at is None:
        return f"[{place}]"
    number = int(np.searchsorted(at, place, "right")) - 1
    return f"[{number}][{place - int(at[number])}]"


def refuse(
    name: str, at: np.ndarray[Any, Any] | None, wrong: Bools, values: np.ndarray[Any, Any], what: str
) -> NoReturn:
    place = int(wrong.argmax())
    raise DataError(f"{name}{index_of(at, place)}: {values[place]} {what}")


def name_what_overflows(data: Mapping[str, Any]) -> NoReturn:
    """For a group whose values are all of their types."""
    for name in ("tokens", "masks", "distill_token_ids"):
        for path, number in _numbers(data[name], name):
            if number is not None and not -(2**31) <= number < 2**31:
                raise DataError(f"{path}: {str(number)[:40]} does not fit 32 bits") from None
    raise DataError("the group has a number that does not fit 32 bits") from None


def _numbers(value: Any, path: str) -> Any:
    if isinstance(value, list):
        for number, entry in enumerate(value):
            yield from _numbers(entry, f"{path}[{number}]")
    else:
        yield path, value

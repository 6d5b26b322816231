"""Lists by sequence -> flat columns. A value of the wrong type raises one of `NOT_OF_ITS_TYPE`, since it may still be coerced.
What coercion cannot fix raises DataError, with the field and the index."""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NoReturn

import numpy as np

from atropos_core.errors import DataError
from atropos_core.types import Bools, Floats, Tokens, offsets_of

_INT32_MAX = (1 << 31) - 1
NOT_OF_ITS_TYPE = (TypeError, OverflowError, struct.error)


@dataclass(slots=True, eq=False)  # not frozen: that would take three times as long to make
class FlatRows:
    """A list of lists of numbers, integers or floats, whose numbers are one array of 64 bits each."""

    lengths: list[int]
    values: np.ndarray[Any, Any]


def ints(rows: Sequence[Sequence[Any]]) -> Tokens:
    """Integers of 32 bits, nothing else, row after row. 8,192 of them take 53 us; numpy, which accepts anything, takes
    107."""
    return _packed("i", rows, np.dtype(np.int32))


def floats(rows: Sequence[Sequence[Any]] | FlatRows) -> Floats:
    """Numbers as 32-bit floats; numbers beyond their range become infinite."""
    if isinstance(rows, FlatRows):
        with np.errstate(over="ignore"):
            return rows.values.astype(np.float32)
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


def tokens_of(tokens: Any, masks: Any, lengths: Sequence[int]) -> tuple[Tokens, np.ndarray[Any, Any], Bools]:
    """Ids from 0 on, their masks, and flags for masks that are the token's own id."""
    masks = by_token("masks", masks, lengths)
    if type(tokens) is FlatRows and type(masks) is FlatRows:
        ids = tokens.values
        highest = ids.item(ids.view(np.uint64).argmax())
        if not 0 <= highest <= _INT32_MAX:  # one is negative or too large; the full way reports which
            raise OverflowError
        return ids.astype(np.int32), masks.values, masks.values == ids
    made = ints(tokens)
    if np.minimum.reduce(made) < 0:
        refuse("tokens", offsets_of(lengths), made < 0, made, "is below 0")
    made_masks = ints(masks)
    return made, made_masks, made_masks == made


def lengths_of(rows: Any) -> list[int]:
    return rows.lengths if type(rows) is FlatRows else list(map(len, lists(rows)))


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
        raise DataError(
            f"{name}: there are {len(rows)}, for {sequences} sequences of tokens",
            remedy="Send one for each sequence of the group.",
        )
    return rows


def by_token(name: str, rows: Any, lengths: Sequence[int]) -> Any:
    """The same rows, after checking that each has as many entries as its sequence has tokens."""
    if type(rows) is FlatRows and rows.lengths == lengths:
        return rows
    counts = list(map(len, lists(counted(name, rows, len(lengths)))))
    if counts != lengths:
        number = next(number for number, count in enumerate(counts) if count != lengths[number])
        raise DataError(
            f"{name}[{number}]: {counts[number]} entries, for {lengths[number]} tokens",
            remedy="Send one entry for each token of the sequence, also for those of the prompt.",
        )
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
    """Raises for a group whose values all have the right types."""
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

"""JSON of the old protocol: numbers within 64 bits coming in, arrays and numbers of any size going out.

A number takes two bytes or more on the wire but 40 as a Python object, and a parser holds Python's lock until it is done. So in a
long body, each list of numbers is read separately and kept as an array, and the number of the remaining values is limited.
"""

from __future__ import annotations

import json
import re
import secrets
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

from atropos_core.errors import DataError
from atropos_trajectory_api.json_in_turns import loads_in_turns
from atropos_trajectory_api.legacy_groups.outgoing_groups import KEYS

MOST_IN_LIST = 300_000  # lists and objects in a body: an empty one of three characters takes 64 bytes once it is read
MOST_IN_GROUP = 1_000_000  # two for each token, if the group has a teacher's likeliest tokens
MOST_VALUES = 2_000_000  # outside long lists of numbers: 80 MB
MOST_OTHERS = 250_000  # in long lists of numbers that are not rows, such as scores
LONG_BYTES = 1 << 18  # shorter bodies cannot hold many values
APART_BYTES = 1 << 19  # from this size on, lists of numbers are read separately
PART_BYTES = 1 << 14  # of a body to scan, or to turn into Python numbers, at one time, because that holds Python's lock
ROWS = ("tokens", "masks", "advantages", "ref_logprobs", "inference_logprobs")  # a list of numbers for each sequence
MANY_NAMES = 10_000  # in objects: a C parser that makes this many Python objects holds Python's lock for some 5 ms
MANY_OBJECTS = 10_000
MOST_ENTRIES = 20_000  # of one object: making it also holds the lock
LONG_LIST = 256  # characters from which a list of numbers is read separately
_STRING_OR_LIST = re.compile(rb'["\[]')
_IN_STRING = re.compile(rb'(?:[^"\\]++|\\.)*+', re.DOTALL)
_IN_NUMBERS = re.compile(rb"[0-9eE+\-., \t\r\n]*+")
_QUOTE = ord('"')
_EXACT = 2**53  # up to which a fraction of 64 bits is equal to each integer
_INT32_MAX = 2**31 - 1
_APART = secrets.token_hex(8)  # clients cannot know the placeholder of a list that was read separately
COLUMNS = frozenset(KEYS) - {"messages", "generation_params", "overrides", "group_overrides", "images", "env_id"}


def parse(body: bytes) -> dict[str, Any] | list[Any]:
    """The object or list of a JSON body. Raises DataError, also for NaN and for an integer beyond 64 bits."""
    if len(body) > LONG_BYTES:
        most = MOST_IN_GROUP if body[:64].lstrip().startswith(b"{") else MOST_IN_LIST
        if (found := _count(body, b"[") + _count(body, b"{")) > most:
            raise DataError(
                f"the body holds {found} lists and objects, but at most {most} are read.",
                remedy="Send fewer groups at once.",
            )
    try:
        value = _loads(body) if len(body) < APART_BYTES else read_in_parts(body)
        if holds_a_large_float(value):  # possibly an integer that orjson turned into a float
            json.loads(body, parse_int=_integer, parse_float=_fraction)
    except (ValueError, RecursionError) as error:
        raise DataError(f"the body is not JSON as the protocol has it: {error}") from error
    if not isinstance(value, (dict, list)):
        raise DataError(f"the body must be a JSON object or list, not {type(value).__name__}")
    return value


@dataclass(frozen=True, slots=True)
class _Numbers:
    """A list of numbers. `whole` marks the floats that were integers; None if all numbers are of one kind."""

    values: NDArray[Any]
    whole: NDArray[np.bool_] | None = None

    def as_list(self) -> list[int | float]:
        numbers: list[int | float] = self.values.tolist()
        if self.whole is None:
            return numbers
        return [int(number) if whole else number for number, whole in zip(numbers, self.whole, strict=True)]


def read_in_parts(body: bytes) -> Any:
    """The same value, but long rows of `ROWS` are arrays: of integers if all fit 32 bits, else of floats."""
    apart: list[_Numbers | None] = []
    pieces: list[bytes] = []
    at = kept = 0  # scanned up to here, and copied to `pieces` up to here
    while at < len(body):
        found = _STRING_OR_LIST.search(body, at, at + PART_BYTES)
        if found is None:
            at += PART_BYTES
            continue
        start = found.start()
        if body[start] == _QUOTE:
            at = _run(_IN_STRING, body, start + 1) + 1
            continue
        at = _run(_IN_NUMBERS, body, start + 1)
        if at - start <= LONG_LIST or body[at : at + 1] != b"]" or (numbers := _numbers(body, start + 1, at)) is None:
            continue
        pieces += body[kept:start], f'"{_APART}{len(apart)}"'.encode()
        apart.append(numbers)
        at = kept = at + 1
    rest = b"".join((*pieces, body[kept:]))
    if (values := _count(rest, b",")) > MOST_VALUES:
        raise DataError(
            f"the body holds some {values} values outside long lists of numbers, but at most {MOST_VALUES} are read.",
            remedy="Send fewer groups at once.",
        )
    value = _loads(rest)
    for group in value if isinstance(value, list) else [value]:
        if isinstance(group, dict):
            for name in ROWS:
                if isinstance(rows := group.get(name), list):
                    group[name] = [_row(row, apart) if isinstance(row, str) else row for row in rows]
    if (others := sum(len(numbers.values) for numbers in apart if numbers is not None)) > MOST_OTHERS:
        raise DataError(f"the body has {others} numbers outside {', '.join(ROWS)}, but at most {MOST_OTHERS} are read.")
    return _with_lists(value, apart)


def has_many_parts(body: bytes) -> bool:
    """Return True if a body has so many objects, lists and names that reading it takes more than some milliseconds."""
    return _count(body, b"{") + _count(body, b"[") > MANY_OBJECTS or _count(body, b'"') > 2 * MANY_NAMES


def _loads(body: bytes) -> Any:
    """As `orjson.loads`, but other threads have their turn while a body of many parts is read. Raises ValueError, RecursionError."""
    if not has_many_parts(body):
        return orjson.loads(body)
    value = loads_in_turns(body.decode(), parse_int=_integer, parse_constant=_no_number, object_pairs_hook=_mapping)
    if b"\\ud" in body or b"\\uD" in body:  # half of a pair may stand there, which orjson refuses
        for piece in json.JSONEncoder(ensure_ascii=False).iterencode(value):
            piece.encode()
    return value


def _count(body: bytes, what: bytes) -> int:
    return sum(body.count(what, at, at + PART_BYTES) for at in range(0, len(body), PART_BYTES))


def _run(of: re.Pattern[bytes], body: bytes, at: int) -> int:
    """The end of the text or list that begins there. In parts: a text of eight million characters would take half a second at once."""
    while True:
        found = of.match(body, at, at + PART_BYTES)
        assert found is not None, "it may be empty"
        end = found.end()
        if end == at or end < at + PART_BYTES - 1:  # the last one may be the first half of an escape
            return end
        at = end


def _numbers(text: bytes, at: int, end: int) -> _Numbers | None:
    """The numbers of a list, from after its bracket to its end. None if it is empty, or has an integer that no 64-bit float equals:
    such a list has 17 bytes for each of them, and may be read as a whole. Raises ValueError."""
    parts: list[NDArray[Any]] = []
    kinds: list[NDArray[np.bool_]] = []
    while at <= end:
        cut = end if end - at <= PART_BYTES else max(text.rfind(b",", at, at + PART_BYTES), at)
        numbers = orjson.loads(b"[%b]" % text[at:cut])
        if not numbers:
            return None
        values, whole = np.array(numbers, np.float64), _which_are_whole(numbers)
        if whole.any() and (largest := np.abs(values[whole]).max()) > _INT32_MAX:
            if largest >= _EXACT:
                return None
        elif whole.all():
            values = values.astype(np.int32)
        parts.append(values)
        kinds.append(whole)
        at = cut + 1
    values, whole = np.concatenate(parts), np.concatenate(kinds)
    is_of_one_kind = values.dtype == np.int32 or not whole.any()
    return _Numbers(values, None if is_of_one_kind else whole)


def _which_are_whole(numbers: list[Any]) -> NDArray[np.bool_]:
    kinds = set(map(type, numbers))
    if len(kinds) == 1:
        return np.full(len(numbers), kinds == {int})
    return np.fromiter((type(number) is int for number in numbers), np.bool_, len(numbers))


def _row(text: str, apart: list[_Numbers | None]) -> Any:
    taken = _taken(text, apart)
    return taken.values if isinstance(taken, _Numbers) else taken


def _taken(text: str, apart: list[_Numbers | None]) -> _Numbers | str | None:
    """The list that a placeholder stands for. It can be taken only once, since no placeholder occurs twice."""
    if not text.startswith(_APART):
        return text
    place = int(text[len(_APART) :])
    taken, apart[place] = apart[place], None
    return taken


def _with_lists(value: Any, apart: list[_Numbers | None]) -> Any:
    """The value with separately read lists that are not rows as lists again."""
    if type(value) is dict:
        return {key: _with_lists(entry, apart) for key, entry in value.items()}
    if type(value) is list:
        return [_with_lists(entry, apart) for entry in value] if set(map(type, value)) & {list, dict, str} else value
    if type(value) is str and isinstance(taken := _taken(value, apart), _Numbers):
        return taken.as_list()
    return value


def without_arrays(group: Any) -> Any:
    """The group with its rows as lists again. Raises DataError if they would be too many."""
    if not isinstance(group, dict) or not any(type(row) is np.ndarray for row in _rows(group)):
        return group
    if sum(map(len, _rows(group))) > MOST_VALUES:
        raise DataError(
            "a group this long must have numbers of the right types: integers in tokens and masks, fractions elsewhere."
        )
    return group | {
        name: [row.tolist() if type(row) is np.ndarray else row for row in group[name]]
        for name in ROWS
        if isinstance(group.get(name), list)
    }


def _rows(group: dict[str, Any]) -> list[Any]:
    columns = [group[name] for name in ROWS if isinstance(group.get(name), list)]
    return [row for row in chain.from_iterable(columns) if isinstance(row, (list, np.ndarray))]


def dumps(value: Any) -> bytes:
    """JSON of plain values and contiguous arrays; integers may have any size."""
    try:
        return orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY)
    except orjson.JSONEncodeError:
        text = json.dumps(value, default=_listed, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
        return text.encode()


def holds_a_large_float(value: Any) -> bool:
    """True if there is a large float outside the token columns, whose numbers are checked elsewhere."""
    if type(value) is dict:
        return any(
            holds_a_large_float(entry) for key, entry in value.items() if entry is not None and key not in COLUMNS
        )
    if type(value) is list:
        return any(map(holds_a_large_float, value))
    return type(value) is float and abs(value) >= 2**63


def _integer(text: str) -> int:
    if len(text) > 20 or not -(2**63) <= int(text) < 2**64:
        raise ValueError(f"the integer {text[:24]}... is beyond 64 bits")
    return int(text)


def _mapping(entries: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(entries) > MOST_ENTRIES:
        raise DataError(
            f"an object has {len(entries):,} entries, but at most {MOST_ENTRIES:,} are read.",
            remedy="Send fewer fields.",
        )
    return dict(entries)


def _no_number(name: str) -> Any:
    raise ValueError(f"{name} is not a number of JSON")


def _fraction(text: str) -> float:
    """Parse a float in Python, so that other threads get a turn between two of a million."""
    return float(text)


def _listed(value: Any) -> Any:
    if isinstance(value, (np.ndarray, np.generic)):
        return value.tolist()
    raise TypeError(f"a {type(value).__name__} cannot be written as JSON")

"""A body with one group, as nearly all are, is read here without a Python object for each of its numbers.

What this reads, `wire_json.parse` reads to the same values, which a test holds it to; what this is not sure of is put to
that, which says what is wrong. simdjson leaves the numbers where it wrote them, and a whole column is copied out at once:
a group of 8 x 64 is read and checked in 51 us, and by way of lists of Python numbers in 69 (CPU time of one core).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import simdjson

from atropos_trajectory_api.legacy.wire_json import COLUMNS, ROWS, holds_a_large_float
from atropos_trajectory_api.legacy.wire_lists import FlatRows

_ROWS = frozenset(ROWS)
_WHOLE = ("tokens", "masks")  # the other rows hold fractions
_NUMBERS = (float, int)  # they have no bracket: a call for each of a list's would be most of what the list costs


class QuickReader:
    """For one thread: what it parses with is used again for the next body."""

    def __init__(self) -> None:
        self._parser = simdjson.Parser()

    def read(self, body: bytes) -> dict[str, Any] | None:
        """The group with its rows as `FlatRows`; None where the body has to be looked at more closely."""
        if not body.startswith(b"{"):  # simdjson takes a byte order mark
            return None
        try:
            return self._read(body)
        except (ValueError, TypeError, RuntimeError):
            return None

    def _read(self, body: bytes) -> dict[str, Any] | None:
        group: dict[str, Any] = {}
        document: Any = self._parser.parse(body)
        brackets = 0
        for name in document.keys():  # noqa: SIM118 - without it they are looked up as well
            if name in group:  # of two, the last counts
                return None
            value = document[name]
            if value is None:
                group[name] = None
                continue
            if name in _ROWS:
                if not isinstance(value, simdjson.Array):
                    return None
                lengths = [len(row) for row in value]  # type: ignore[arg-type] # TypeError for a number
                brackets += 1 + len(lengths)
                group[name] = _rows(value, lengths, name in _WHOLE) if lengths else []
                continue
            if isinstance(value, simdjson.Array):
                value = value.as_list()
            elif isinstance(value, simdjson.Object):
                value = value.as_dict()
            if type(value) is not int:
                brackets += _brackets(value)
                if name not in COLUMNS and holds_a_large_float(value):
                    return None
            group[name] = value
        # a list within a row would have been read as if its numbers were the row's
        if brackets != len(body) - len(body.replace(b"[", b"")):  # they are few: a third of what it costs to count them
            return None
        if b"\\" in body and b"\\u005" in body:  # a bracket in a text that is none in the body
            return None
        return group


def _rows(column: Any, lengths: list[int], whole: bool) -> FlatRows:
    """Raises TypeError for what is no number, or none of its kind."""
    kind, dtype = ("i", np.int64) if whole else ("d", np.float64)
    values = np.frombuffer(column.as_buffer(of_type=kind), dtype)
    if len(values) != sum(lengths):
        raise TypeError
    return FlatRows(lengths, values)


def _brackets(value: Any) -> int:
    """How many a body has for this value, those in its texts included."""
    if isinstance(value, list):
        return 1 + sum(_brackets(entry) for entry in value if type(entry) not in _NUMBERS)
    if isinstance(value, dict):
        return sum(_brackets(key) + _brackets(entry) for key, entry in value.items())
    return value.count("[") if isinstance(value, str) else 0

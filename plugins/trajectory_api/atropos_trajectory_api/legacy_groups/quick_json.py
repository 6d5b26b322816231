"""Read a body with one group, as nearly all bodies are, without a Python object for each of its numbers.

`wire_json.parse` reads the same values from what is read here; a test checks that. Any doubtful body is left to `parse`, which reports
what is wrong. simdjson keeps the numbers in its own memory, and a whole column is copied at once. A group of 8 x 64 is read and
checked in 51 us, compared with 69 us with lists of Python numbers (CPU time of one core).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import simdjson

from atropos_trajectory_api.legacy_groups.wire_json import COLUMNS, ROWS, holds_a_large_float
from atropos_trajectory_api.legacy_groups.wire_lists import FlatRows

_ROWS = frozenset(ROWS)
_WHOLE = ("tokens", "masks")  # the other rows hold fractions
_NUMBERS = (float, int)  # they contain no bracket: a call for each number would take most of a list's time


class QuickReader:
    """For one thread: its parser is used again for the next body."""

    def __init__(self) -> None:
        self._parser = simdjson.Parser()

    def read(self, body: bytes) -> dict[str, Any] | None:
        """The group with its rows as `FlatRows`. None if the body must be read the full way."""
        if not body.startswith(b"{"):  # simdjson accepts a byte order mark
            return None
        try:
            return self._read(body)
        except (ValueError, TypeError, RuntimeError):
            return None

    def _read(self, body: bytes) -> dict[str, Any] | None:
        group: dict[str, Any] = {}
        document: Any = self._parser.parse(body)
        brackets = 0
        for name in document.keys():  # noqa: SIM118 - without it the values are looked up as well
            if name in group:  # of two equal keys, the last counts
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
        if brackets != len(body) - len(
            body.replace(b"[", b"")
        ):  # for few brackets, a third of the cost of counting them
            return None
        if b"\\" in body and b"\\u005" in body:  # an escaped bracket in a text, which the body does not show as one
            return None
        return group


def _rows(column: Any, lengths: list[int], whole: bool) -> FlatRows:
    """A column of numbers. Raises TypeError for other values, or numbers of the wrong kind."""
    kind, dtype = ("i", np.int64) if whole else ("d", np.float64)
    values = np.frombuffer(column.as_buffer(of_type=kind), dtype)
    if len(values) != sum(lengths):
        raise TypeError
    return FlatRows(lengths, values)


def _brackets(value: Any) -> int:
    """The number of brackets that a body has for this value, including those in its texts."""
    if isinstance(value, list):
        return 1 + sum(_brackets(entry) for entry in value if type(entry) not in _NUMBERS)
    if isinstance(value, dict):
        return sum(_brackets(key) + _brackets(entry) for key, entry in value.items())
    return value.count("[") if isinstance(value, str) else 0

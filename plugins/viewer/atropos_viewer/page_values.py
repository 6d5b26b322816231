"""Values as a page shows them."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

DIGITS = 7  # of a float32; the page shows as many of a float64


def number(value: object) -> float | None:
    """The number with the digits that a page shows. None if the value is not a finite number."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        found = float(f"{value:.{DIGITS}g}")
    except OverflowError:  # an integer too large for a float
        return None
    return found if math.isfinite(found) else None


def numbers(column: NDArray[Any] | None) -> list[float | None] | None:
    """The column as numbers. None if there is no column, or it has no finite number."""
    if column is None or not np.isfinite(column).any():
        return None
    return [number(value) for value in column.tolist()]


def coded(values: Iterable[str]) -> dict[str, Any]:
    """Each text once, and for each row the index of its text."""
    names: dict[str, int] = {}
    return {"at": [names.setdefault(value, len(names)) for value in values], "names": list(names)}


def text_of(message: Mapping[str, Any]) -> str:
    """The text of a message, in whatever form its content is."""
    content = message.get("content")
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        return "\n".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
    return "" if content is None else json.dumps(content, ensure_ascii=False, default=str)


def tool_calls(message: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Id and name of each call in a message, in OpenAI's form or flat."""
    calls = message.get("tool_calls")
    found = []
    for call in calls if isinstance(calls, list) else ():
        if isinstance(call, dict):
            function = call.get("function")
            named = function if isinstance(function, dict) else call
            found.append((str(call.get("id", "")), str(named.get("name", "tool"))))
    return found

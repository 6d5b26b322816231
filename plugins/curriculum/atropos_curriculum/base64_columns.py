"""Columns of numbers as JSON: base64 of their little-endian bytes."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np
from numpy.typing import NDArray


def packed(column: NDArray[Any]) -> str:
    return base64.b64encode(np.asarray(column, column.dtype.newbyteorder("<")).tobytes()).decode("ascii")


def unpacked(text: str, dtype: Any) -> NDArray[Any]:
    """The column in `text`. Raises ValueError if the text is not such a column."""
    raw = base64.b64decode(text, validate=True)
    return np.frombuffer(raw, np.dtype(dtype).newbyteorder("<")).astype(dtype)

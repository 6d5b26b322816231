"""JSON as the old protocol has it: numbers within 64 bits coming in, arrays and numbers of any size going out."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import orjson

from atropos_core.errors import DataError
from atropos_core.wire import KEYS

MOST_IN_LIST = 300_000  # lists and objects in a body: an empty one of three characters takes 64 bytes once it is read
MOST_IN_GROUP = 1_000_000  # two for each token, where a teacher's likeliest tokens come along
LONG_BYTES = 1 << 18  # what is shorter cannot hold many
_COLUMNS = frozenset(KEYS) - {"messages", "generation_params", "overrides", "group_overrides", "images", "env_id"}


def parse(body: bytes) -> dict[str, Any] | list[Any]:
    """The object or list of a JSON body. Raises DataError, also for NaN and for an integer beyond 64 bits."""
    if len(body) > LONG_BYTES:
        most = MOST_IN_GROUP if body[:64].lstrip().startswith(b"{") else MOST_IN_LIST
        if (found := body.count(b"[") + body.count(b"{")) > most:
            raise DataError(
                f"the body holds {found} lists and objects, and up to {most} are read.",
                remedy="Send fewer groups at once.",
            )
    try:
        value = orjson.loads(body)
        if _holds_a_large_float(value):  # or else an integer that orjson made a float of
            json.loads(body, parse_int=_integer)
    except (ValueError, RecursionError) as error:
        raise DataError(f"the body is not JSON as the protocol has it: {error}") from error
    if not isinstance(value, (dict, list)):
        raise DataError(f"the body must be a JSON object or list, not {type(value).__name__}")
    return value


def dumps(value: Any) -> bytes:
    """JSON of plain values and contiguous arrays; integers may be of any size."""
    try:
        return orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY)
    except orjson.JSONEncodeError:
        text = json.dumps(value, default=_listed, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
        return text.encode()


def _holds_a_large_float(value: Any) -> bool:
    """Outside the token columns, whose numbers are checked where their types are known."""
    if type(value) is dict:
        return any(_holds_a_large_float(entry) for key, entry in value.items() if key not in _COLUMNS)
    if type(value) is list:
        return any(map(_holds_a_large_float, value))
    return type(value) is float and abs(value) >= 2**63


def _integer(text: str) -> int:
    if len(text) > 20 or not -(2**63) <= int(text) < 2**64:
        raise ValueError(f"the integer {text[:24]}... is beyond 64 bits")
    return int(text)


def _listed(value: Any) -> Any:
    if isinstance(value, (np.ndarray, np.generic)):
        return value.tolist()
    raise TypeError(f"a {type(value).__name__} has no place in JSON")

"""JSON of any length, parsed in a thread while other threads run."""

from __future__ import annotations

import json
from json.scanner import py_make_scanner  # type: ignore[attr-defined] # there in every Python, in no stub
from typing import Any


def loads_in_turns(text: str, **options: Any) -> Any:
    """Parse JSON like `json.loads`, in up to ten times its time: the reader is in Python, so that other threads can run. The one in
    C holds Python's lock until it has read everything. Raises ValueError, RecursionError."""
    decoder = json.JSONDecoder(**options)
    decoder.scan_once = py_make_scanner(decoder)  # type: ignore[attr-defined] # as above
    return decoder.decode(text)

"""Every field of a body with every value that arithmetic, text or memory might stumble over."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from atropos_core.codec import PREFIX_BYTES, encode_bytes

_PREFIX = struct.Struct("<4sIQ")
_MARK = "@the value@"
_DEEP = 10_000

# As text: some of them no encoder writes.
PLAIN: dict[str, str] = {
    "10**400": "1" + 400 * "0", "-10**400": "-1" + 400 * "0", "2**63": str(1 << 63), "2**31": str(1 << 31), "-1": "-1",
    "-0.0": "-0.0", "0.5": "0.5", "3e38": "3e38", "1e308": "1e308", "1e-320": "1e-320", "nan": "NaN", "inf": "Infinity",
    "-inf": "-Infinity", "true": "true", "null": "null", "text": '"text"', "empty text": '""', "half a pair": '"\\ud800"',
    "a zero byte": '"\\u0000"', "a list": "[1, 2]", "an empty list": "[]", "a mapping": '{"a": 1}', "an empty mapping": "{}",
    "deep lists": "[" * _DEEP + "]" * _DEEP, "deep mappings": '{"a":' * _DEEP + "1" + "}" * _DEEP,
}  # fmt: skip
OF_FRAMES: dict[str, str] = {
    "floats": '{"~c": ["<f4", [3], 1]}', "an array of one": '{"~c": ["<i4", [1], 1]}', "an array of none": '{"~a": ["<f8", [0], 0]}',
    "a scalar array": '{"~c": ["<f8", [], 0]}', "bytes": '{"~b": [0, 0]}', "a tuple": '{"~t": [1, 2]}',
    "a record": '{"~r": "Draw", "~f": [1, "one", "train", 1, 1]}', "a sampling": '{"~r": "Sampling", "~f": [[], {}, "1", true]}',
}  # fmt: skip


class Case(NamedTuple):
    field: str
    value: str
    body: bytes


def of_json(body: Any) -> Iterator[Case]:
    for field, text in _marked(body):
        for name, value in PLAIN.items():
            yield Case(field, name, text.replace(json.dumps(_MARK), value).encode())


def of_frame(body: Any) -> Iterator[Case]:
    """The frame of `body`: any place of its header, arrays and records among them."""
    frame = encode_bytes(body)
    _, length, size = _PREFIX.unpack_from(frame)
    header, buffers = json.loads(frame[PREFIX_BYTES : PREFIX_BYTES + length]), frame[PREFIX_BYTES + length :]
    for field, text in _marked(header):
        for name, value in (PLAIN | OF_FRAMES).items():
            made = text.replace(json.dumps(_MARK), value).encode()
            yield Case(field, name, _PREFIX.pack(b"ATR1", len(made), size) + made + buffers)


def _marked(body: Any) -> Iterator[tuple[str, str]]:
    """The body as text, once with the mark at each of its positions."""
    for path in _paths(body, ()):
        yield ".".join(map(str, path)) or "the body", json.dumps(_with_mark(body, path))


def _paths(value: Any, path: tuple[Any, ...]) -> Iterator[tuple[Any, ...]]:
    yield path
    if isinstance(value, dict):
        for key in value:
            yield from _paths(value[key], (*path, key))
    elif isinstance(value, list):
        fields = path and path[-1] in ("~f", "~g")  # of a record; else what follows is of the same kind
        for index in range(len(value) if fields else min(len(value), 2)):
            yield from _paths(value[index], (*path, index))


def _with_mark(value: Any, path: tuple[Any, ...]) -> Any:
    if not path:
        return _MARK
    key, *rest = path
    if isinstance(value, dict):
        return {name: _with_mark(entry, tuple(rest)) if name == key else entry for name, entry in value.items()}
    return [_with_mark(entry, tuple(rest)) if index == key else entry for index, entry in enumerate(value)]


def engine_bodies() -> dict[str, Any]:
    """Right ones of the engine's endpoint, by path."""
    from atropos_core.types import Sampling

    prompt = np.array([1, 2, 3], np.int32)
    call = {"prompt": prompt, "n": 2, "seeds": [1, 2], "sampling": Sampling(max_tokens=3), "deadline_s": 5.0}
    return {
        "/v1/engine/open": {"transport": "checkpoint"},
        "/v1/engine/samples": {"calls": [call]},
        "/v1/engine/logprobs": {"sequences": [prompt], "temperature": 1.0},
        "/v1/engine/load_weights": {"holder": "run", "upload": "nothing"},
        "/v1/engine/load_adapter": {"holder": "run", "upload": "nothing", "version": 1},
        "/v1/engine/pause": {"holder": "run"},
        "/v1/engine/resume": {"holder": "run", "version": 1},
    }

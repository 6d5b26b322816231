"""Records and values survive the way through bytes; what is not a frame is refused by name."""

from __future__ import annotations

import json
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from atropos_core.batching import pack
from atropos_core.codec import PREFIX_BYTES, decode, encode, encode_bytes, frame_size
from atropos_core.errors import DataError
from atropos_core.interfaces import ModelInfo
from atropos_core.testing.samples import make_groups
from atropos_core.types import Column, Completion, Sampling, Task

arrays = hnp.arrays(
    st.sampled_from([np.bool_, np.int8, np.int32, np.int64, np.uint16, np.float16, np.float32, np.float64, ">i4"]),
    hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4),
)
leaves = (
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary(max_size=40) | arrays
)
values = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(
            st.text(max_size=5) | st.sampled_from(["~a", "~r", "~t", "~b", "~d", "~f"]), inner, max_size=4
        )
    ),
    max_leaves=12,
)


def same(one: Any, other: Any) -> bool:
    if isinstance(one, np.ndarray):
        whole = isinstance(other, np.ndarray) and one.dtype == other.dtype and one.shape == other.shape
        return whole and one.tobytes() == other.tobytes()
    if is_dataclass(one):
        return type(one) is type(other) and all(same(getattr(one, f.name), getattr(other, f.name)) for f in fields(one))
    if isinstance(one, dict):
        return isinstance(other, dict) and list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return type(one) is type(other) and len(one) == len(other) and all(map(same, one, other))
    return type(one) is type(other) and bool(one == other)


@given(values)
@settings(deadline=None, max_examples=300)
def test_any_value_comes_back_as_it_was(value: Any) -> None:
    assert same(decode(encode_bytes(value)), value)


@pytest.mark.parametrize(
    "record",
    [
        Sampling(7, 0.5, 0.9, 3),
        Task("id", ({"role": "user", "content": "hé"},), None, {"a": [1, {"b": np.arange(3)}]}),
        ModelInfo("A", 1, 2, "float32", "cpu", "f", 2),
        Completion(np.arange(2, dtype=np.int32), np.zeros(2, np.float32), np.zeros(2, np.int32), "length", 1.0, True),
        *make_groups(),
    ],
    ids=lambda one: type(one).__name__,
)
def test_a_record_comes_back_as_it_was(record: Any) -> None:
    assert same(decode(encode_bytes(record)), record)


def test_a_batch_with_columns_comes_back_as_it_was() -> None:
    groups = [group.with_advantages(group.rewards) for group in make_groups()]
    batch = pack(groups, 3)
    column = Column("sequence", np.arange(batch.sequences, dtype=np.float32), np.ones(batch.sequences, bool))
    batch = type(batch)(**{**vars(batch), "columns": {"teacher": column}})
    assert same(decode(encode_bytes(batch)), batch)


def test_arrays_that_are_not_contiguous_are_sent_whole() -> None:
    values = np.arange(24).reshape(4, 6)[::2, ::-1]
    assert same(decode(encode_bytes(values)), np.ascontiguousarray(values))


def test_arrays_are_not_copied_in_and_are_views_of_the_frame_out() -> None:
    values = np.arange(1000, dtype=np.int32)
    assert any(np.shares_memory(np.frombuffer(buffer, np.uint8), values) for buffer in encode(values) if len(buffer))
    frame = encode_bytes(values)
    assert np.shares_memory(decode(frame), np.frombuffer(frame, np.uint8))
    assert not decode(frame).flags.writeable
    assert decode(bytearray(frame)).flags.writeable


def test_numpy_numbers_and_paths_become_plain_ones() -> None:
    assert decode(encode_bytes({"a": np.float32(0.5), "b": Path("/x"), "c": np.int64(2)})) == {
        "a": 0.5,
        "b": "/x",
        "c": 2,
    }


@pytest.mark.parametrize(
    "value", [object(), {1: 2}, {"a": {3}}, np.array([object()]), np.array(["text"]), lambda: 0, 1j, Exception("x")],
    ids=repr,
)  # fmt: skip
def test_what_has_no_encoding_is_refused(value: Any) -> None:
    with pytest.raises(DataError, match="no encoding"):
        encode(value)


@given(st.data())
@settings(deadline=None, max_examples=400)
def test_a_damaged_frame_decodes_to_something_or_raises_data_error(data: st.DataObject) -> None:
    frame = bytearray(encode_bytes([make_groups()[0], {"x": np.arange(5), "y": (1, b"abc", "text")}]))
    header_end = PREFIX_BYTES + frame_size(frame) if data.draw(st.booleans()) else len(frame) // 4
    for _ in range(data.draw(st.integers(1, 3))):
        frame[data.draw(st.integers(0, min(header_end, len(frame)) - 1))] = data.draw(st.integers(0, 255))
    try:
        decode(bytes(frame[: data.draw(st.sampled_from([len(frame), len(frame) - 1, 3]))]))
    except DataError:
        pass


@pytest.mark.parametrize(
    "header",
    [
        {"~a": ["|O", [1], 0]},
        {"~a": ["<i4", [5], 0]},
        {"~a": ["<i4", [1], -4]},
        {"~a": ["<i4", [-1], 0]},
        {"~a": ["nonsense", [1], 0]},
        {"~a": 3},
        {"~r": "Popen", "~f": []},
        {"~r": "Rollout", "~f": []},
        {"~r": "Rollout", "~f": [1, 2, 3, 4, 5, 6, 7, 8]},
        {"~r": ["Rollout"], "~f": []},
        {"~r": "ScoredGroup", "~f": [1, 2, 3, 4]},
        {"~b": [5, 100]},
        {"~d": 4},
        {"~t": 4},
    ],
    ids=json.dumps,
)
def test_a_header_that_lies_is_refused(header: Any) -> None:
    text = json.dumps(header).encode()
    frame = b"ATR1" + len(text).to_bytes(4, "little") + (8).to_bytes(8, "little") + text + bytes(8)
    with pytest.raises(DataError):
        decode(frame)


def test_a_header_nested_without_end_is_refused() -> None:
    text = b"[" * 200_000 + b"]" * 200_000
    frame = b"ATR1" + len(text).to_bytes(4, "little") + (0).to_bytes(8, "little") + text
    with pytest.raises(DataError):
        decode(frame)


def test_bytes_of_another_program_are_named() -> None:
    with pytest.raises(DataError, match="not a frame of this program: it begins with b'HTTP'"):
        frame_size(b"HTTP/1.1 200 OK\r\n")


def test_a_frame_says_its_own_length() -> None:
    frame = encode_bytes({"a": np.arange(5)})
    assert frame_size(frame) == len(frame) - PREFIX_BYTES

"""Records and values survive the way through bytes; what is not a frame is refused by name."""

from __future__ import annotations

import json
import math
import struct
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from atropos_core.codec import MAX_IMPLIED_BYTES, PREFIX_BYTES, decode, encode, encode_bytes, frame_size
from atropos_core.codec import frames as codec
from atropos_core.errors import DataError
from atropos_core.interfaces import ModelInfo
from atropos_core.training.batch import to_batch
from atropos_core.types import (
    Column,
    Completion,
    Draw,
    Episode,
    Failed,
    Ragged,
    Rollout,
    Sampling,
    ScoredGroup,
    Task,
    TopK,
)
from atropos_testing.samples import make_groups

arrays = hnp.arrays(
    st.sampled_from([np.bool_, np.int8, np.int32, np.int64, np.uint16, np.float16, np.float32, np.float64, ">i4"]),
    hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4),
)
alike = st.builds(  # long enough to be written as one value, or almost
    lambda dtype, value, length, odd: np.where(np.arange(length) == odd, 1 - value, value).astype(dtype),
    st.sampled_from([np.bool_, np.int8, np.uint16, np.int32, np.float32, np.float64, ">f4", ">i8", np.longdouble]),
    st.sampled_from([0, 1, -0.0]),
    st.integers(60, 140),
    st.integers(0, 200),
)
leaves = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary(max_size=40)
    | arrays
    | alike
)
values = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(
            st.text(max_size=5) | st.sampled_from(["~a", "~c", "~p", "~r", "~t", "~b", "~d", "~f"]), inner, max_size=4
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
@settings(max_examples=300)
def test_any_value_comes_back_as_it_was(value: Any) -> None:
    assert same(decode(encode_bytes(value)), value)


@pytest.mark.parametrize(
    "record",
    [
        Sampling(7, 0.5, 0.9, 3),
        Sampling(7, 0.5, 0.9, 3, (5, 6)),
        Sampling(7, 0.5, 0.9, 3, (), ("a", "\u00e9")),
        Task("id", ({"role": "user", "content": "hé"},), None, {"a": [1, {"b": np.arange(3)}]}),
        ModelInfo("A", 1, 2, "float32", "cpu", "f", 2),
        TopK(np.array([0, 0, 2]), np.array([3, 4], np.int32), np.array([-1, -2], np.float32)),
        Ragged(np.array([0, 2]), np.arange(2.0)),
        Completion(np.arange(2, dtype=np.int32), np.zeros(2, np.float32), np.zeros(2, np.int32), "length", 1.0, True),
        *make_groups(),
    ],
    ids=lambda one: type(one).__name__,
)
def test_a_record_comes_back_as_it_was(record: Any) -> None:
    assert same(decode(encode_bytes(record)), record)


def test_a_sampling_without_stop_ids_is_written_as_before_there_were_any() -> None:
    assert b'{"~r":"Sampling","~f":[7,0.5,0.9,3]}' in encode_bytes(Sampling(7, 0.5, 0.9, 3))
    assert b'{"~r":"Sampling","~f":[7,0.5,0.9,3,{"~t":[5]}]}' in encode_bytes(Sampling(7, 0.5, 0.9, 3, (5,)))


def test_what_a_run_sets_of_sampling_comes_back_from_json() -> None:
    for made in (Sampling(7, 0.5), Sampling(7, 0.5, stop=("a", "b"))):
        assert Sampling.from_run(json.loads(json.dumps(made.of_run()))) == made
    assert "stop" not in Sampling().of_run(), "older ends know none"


def test_a_batch_with_columns_comes_back_as_it_was() -> None:
    groups = [group.with_advantages(group.rewards) for group in make_groups()]
    batch = to_batch(groups, 3)
    column = Column("sequence", np.arange(batch.sequences, dtype=np.float32), np.ones(batch.sequences, bool))
    ragged = Ragged(np.arange(len(batch.tokens) + 1), np.arange(len(batch.tokens), dtype=np.float32))
    batch = replace(batch, columns={"value": column}, ragged={"teacher": ragged})
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


@pytest.mark.parametrize(
    "value",
    [
        np.full(1024, 3, np.int32), np.zeros((32, 32), np.float32), np.full(100, -0.0), np.full(100, math.nan, ">f4"),
        np.ones(2000, bool), np.full(64, -(2**63)), np.full(64, 1e-310), np.broadcast_to(np.float32(0.1), (50, 50)),
    ],
    ids=lambda value: f"{value.dtype}",
)  # fmt: skip
def test_an_array_of_one_value_costs_no_more_than_the_value(value: Any) -> None:
    frame = encode_bytes(value)
    assert len(frame) < PREFIX_BYTES + 64
    again = decode(frame)
    assert same(again, value)
    assert not again.flags.writeable
    assert encode_bytes(again) == frame


@pytest.mark.parametrize("odd", [0, 1, 511, 1023])
def test_one_entry_that_differs_is_kept(odd: int) -> None:
    values = np.where(np.arange(1024) == odd, np.float32(0.0), np.float32(-0.0))
    assert same(decode(encode_bytes(values)), values), "0.0 is not -0.0"


def test_flags_are_written_as_bits_and_one_array_only_once() -> None:
    flags = np.arange(1003) % 3 == 0
    assert len(encode_bytes(flags)) < 1003 // 8 + 64
    assert same(decode(encode_bytes(flags.reshape(17, 59)[::-1, ::2])), flags.reshape(17, 59)[::-1, ::2].copy())
    values = np.arange(1000)
    once, thrice = encode_bytes([values]), encode_bytes([values, values, {"a": values}])
    assert len(thrice) < len(once) + 100
    assert same(decode(thrice), [values, values, {"a": values}])


def test_what_a_frame_stands_for_is_bounded_at_both_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codec, "MAX_IMPLIED_BYTES", 10_000)
    values = [np.zeros(1000), np.arange(1000), *[np.ones(1000, np.int32)] * 5, np.arange(500) > 1]
    values.append(values[1])
    frame = encode_bytes(values)
    assert same(decode(frame), values), "what goes over the bound is written out"
    assert len(frame) > 8000 + 4 * 4000
    monkeypatch.setattr(codec, "MAX_IMPLIED_BYTES", MAX_IMPLIED_BYTES)
    header = json.dumps([{"~c": ["<f8", [MAX_IMPLIED_BYTES // 8 - 1], 0]}, {"~c": ["<f8", [2], 0]}]).encode()
    frame = b"ATR1" + len(header).to_bytes(4, "little") + bytes(8) + header
    with pytest.raises(DataError, match="stands for arrays this long"):
        decode(frame)


def test_numpy_numbers_and_paths_become_plain_ones() -> None:
    assert decode(encode_bytes({"a": np.float32(0.5), "b": Path("/x"), "c": np.int64(2)})) == {
        "a": 0.5,
        "b": "/x",
        "c": 2,
    }


@pytest.mark.parametrize(
    "value", [object(), {1: 2}, {"a": {3}}, np.array([object()]), np.array(["text"]), lambda: 0, 1j, Exception("x")],
    ids=["object", "whole key", "set", "array of objects", "array of text", "function", "complex", "exception"],
)  # fmt: skip
def test_what_has_no_encoding_is_refused(value: Any) -> None:
    with pytest.raises(DataError, match="no encoding"):
        encode(value)


@given(st.data())
@settings(max_examples=400)
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
        {"~c": ["|O", [1], 0]},
        {"~c": ["<i4", [1], -1]},
        {"~c": ["<i4", [1], 2**32]},
        {"~c": ["<i4", [1], 0.5]},
        {"~c": ["<i4", [-1], 0]},
        {"~c": ["<i4", [2**40], 0]},
        {"~c": ["<i4", [2**32, 2**32], 0]},
        [{"~c": ["<i4", [2**25], 0]}] * 3,
        {"~p": [[65], 0]},
        {"~p": [[-8], 0]},
        {"~p": [[8], 8]},
        {"~p": [[2**62], 0]},
        {"~z": 1},
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


def _mixed_group() -> ScoredGroup:
    """Rollouts that differ in whatever they can differ in."""

    def rollout(length: int, version: Any, **more: Any) -> Rollout:
        random = np.random.default_rng(length)
        chosen = random.random(length) < 0.5
        values = np.where(chosen, -random.random(length), 0).astype(np.float32)
        tokens, versions = random.integers(0, 99, length).astype(np.int32), np.asarray(version, np.int32)
        return Rollout(
            tokens, chosen, more.pop("trained", chosen), values, np.broadcast_to(versions, length), 1.0, **more
        )

    taught = TopK(np.array([0, 1, 1, 3]), np.array([3, 4, 5], np.int32), np.full(3, -1, np.float32))
    first = (rollout(3, 7, teacher=taught), replace(rollout(70, np.arange(70)), logprobs=None))
    second = (rollout(90, -1, trained=np.zeros(90, bool), truncated=True), rollout(80, 2, sft=True))
    second = (second[0], replace(second[1], temperature=1))
    third = (rollout(4, 3, advantages=np.ones(4, np.float32), ref_logprobs=-np.ones(4, np.float32)),)
    messages = ({"role": "user", "content": "hé"},)
    episodes = (
        Episode(first, 0.5, True, {"exact": 1.0}, {"turns": 2}, messages, "length"),
        Episode(second, -0.0),
        Episode(third, 2),
    )
    rewards = np.arange(3, dtype=np.float32)
    return ScoredGroup(
        Draw(3, "words", "test", 1, -5), Task("t", messages, "14", {"a": np.arange(9)}), episodes, rewards,
        {"exact": rewards}, (Failed("why", "play", "trace"),), -rewards, {"env_id": 3},
    )  # fmt: skip


def test_rollouts_that_differ_in_everything_come_back_as_they_were() -> None:
    group = _mixed_group()
    assert same(decode(encode_bytes(group)), group)
    assert same(decode(encode_bytes({"list": [group, group]})), {"list": [group, group]})


def test_a_group_of_short_rollouts_is_little_more_than_its_arrays() -> None:
    groups = make_groups()
    for group in groups:
        arrays = sum(rollout.size_bytes for episode in group.episodes for rollout in episode.rollouts)
        assert len(encode_bytes(group)) < arrays + 1000


@given(st.data())
@settings(max_examples=300)
def test_columns_with_anything_in_any_place_are_refused_or_are_a_group(data: st.DataObject) -> None:
    frame = encode_bytes(_mixed_group())
    _, length, size = struct.unpack_from("<4sIQ", frame)
    header = json.loads(frame[PREFIX_BYTES : PREFIX_BYTES + length])
    fields_of = header["~g"]
    wrong = st.sampled_from(
        [None, True, -1, 1 << 40, 1.5, "", "~a", [], {}, [[1]], [1, -1], {"~r": "Rollout", "~f": []}]
    )
    place = data.draw(st.integers(0, len(fields_of) - 1))
    if isinstance(fields_of[place], list) and fields_of[place] and data.draw(st.booleans()):
        fields_of[place][data.draw(st.integers(0, len(fields_of[place]) - 1))] = data.draw(wrong)
    else:
        fields_of[place] = data.draw(wrong)
    raw = json.dumps(header).encode()
    torn = struct.pack("<4sIQ", b"ATR1", len(raw), size) + raw + frame[PREFIX_BYTES + length :]
    try:
        decode(torn)
    except DataError:
        pass

"""The quick reader reads the same group as the full way, or leaves the body to it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atropos_core.errors import DataError
from atropos_trajectory_api.legacy_groups.incoming_groups import parse, read
from atropos_trajectory_api.legacy_groups.quick_json import QuickReader
from tests.old_payloads import old_group

READER = QuickReader()
SMALL = {
    "tokens": [[5, 6, 7], [5, 8]], "masks": [[-100, 6, 7], [-100, 8]], "scores": [1.0, -0.5],
    "advantages": [[0, 0.5, -0.5], [0.0, 2]], "ref_logprobs": [[0.0, -1.5, -2.0], [0.0, -0.25]],
    "inference_logprobs": [[1.0, -0.1, -0.2], [1.0, -0.3]], "env_id": 3,
    "messages": [[{"role": "user", "content": "a[0] = \"ü\"?\n", "reward": 0.5}], [{"role": "tool", "content": [1, {"a": None}]}]],
    "generation_params": {"temperature": 0.7, "seed": 3}, "overrides": [{"temperature": 0.5}, {"sft": True}],
    "distill_token_ids": [[[], [6, 1], [7]], [[], [8, 2, 3]]],
    "distill_logprobs": [[[], [-0.5, -1.5], [-0.1]], [[], [-1.0, -2.0, -3.0]]],
}  # fmt: skip


def frame(value: Any) -> bytes | None:
    """The group that the hub would keep; None if it is refused."""
    try:
        return read(value, "words").frame()
    except DataError:
        return None


def the_whole_way(body: bytes) -> bytes | None:
    try:
        return frame(parse(body))
    except DataError:
        return None


@pytest.mark.parametrize("group", [SMALL, old_group(8, 64, 1)], ids=["with everything", "as they come"])
def test_an_honest_group_is_read_quickly_and_to_the_same(group: dict[str, Any]):
    body = json.dumps(group, ensure_ascii=False).encode()
    found = READER.read(body)
    assert found is not None
    assert frame(found) == the_whole_way(body) is not None


UNSURE = {
    "a list within a row": b'{"tokens":[[[5],6]],"masks":[[5,6]],"scores":[1]}',
    "a list within a row, and a bracket that is escaped": b'{"tokens":[[[5],6]],"masks":[[5,6]],"scores":[1],"images":"\\u005b"}',
    "a name twice": b'{"tokens":[[1]],"tokens":[[5,6]],"masks":[[5,6]],"scores":[1]}',
    "a name twice, once escaped": b'{"tokens":[[1]],"\\u0074okens":[[5,6]],"masks":[[5,6]],"scores":[1]}',
    "a byte order mark": b'\xef\xbb\xbf{"tokens":[[5,6]],"masks":[[5,6]],"scores":[1]}',
    "fractions for tokens": b'{"tokens":[[5.0,6.0]],"masks":[[5,6]],"scores":[1]}',
    "a flag among numbers": b'{"tokens":[[5,6]],"masks":[[5,6]],"scores":[1],"advantages":[[true,0]]}',
    "text among numbers": b'{"tokens":[["5",6]],"masks":[[5,6]],"scores":[1]}',
    "an object for a row": b'{"tokens":[{"5":6}],"masks":[[6]],"scores":[1]}',
    "text for rows": b'{"tokens":"a","masks":[[5]],"scores":[1]}',
    "an object for rows": b'{"tokens":{"a":[5]},"masks":[[5]],"scores":[1]}',
    "a number for a row": b'{"tokens":[5],"masks":[[5]],"scores":[1]}',
    "an integer beyond 64 bits": b'{"tokens":[[18446744073709551616]],"masks":[[5]],"scores":[1]}',
    "an integer beyond 64 bits elsewhere": b'{"tokens":[[5]],"masks":[[5]],"scores":[1],"images":[184467440737095516160]}',
    "a float as large": b'{"tokens":[[5]],"masks":[[5]],"scores":[1],"images":[1e19]}',
    "NaN": b'{"tokens":[[5]],"masks":[[5]],"scores":[1],"advantages":[[NaN]]}',
    "half of a surrogate pair": b'{"tokens":[[5]],"masks":[[5]],"scores":[1],"images":"\\ud800"}',
    "what is no UTF-8": b'{"tokens":[[5]],"masks":[[5]],"scores":[1],"images":"\xff"}',
    "something after it": b'{"tokens":[[5]],"masks":[[5]],"scores":[1]} 1',
    "deep nesting": b'{"tokens":[[5]],"masks":[[5]],"scores":[1],"images":' + b"[" * 990 + b"]" * 990 + b"}",
    "a list of groups": b'[{"tokens":[[5]],"masks":[[5]],"scores":[1]}]',
    "nothing": b"",
}  # fmt: skip


@pytest.mark.parametrize("body", UNSURE.values(), ids=UNSURE.keys())
def test_what_it_is_not_sure_of_is_left_to_the_whole_way(body: bytes):
    assert READER.read(body) is None
    good = json.dumps(SMALL).encode()
    assert READER.read(good) is not None, "and the next one is read as ever"


NUMBERS = (
    "0", "-0", "-0.0", "7", "-100", "-1", "2147483647", "2147483648", "-2147483649", "9223372036854775807", "9223372036854775808",
    "18446744073709551615", "9007199254740993", "1e2", "0.1", "1.5", "-3.4e38", "3.5e38", "1e300", "1e-400", "1e400", "01", "-", "NaN",
    "true", "null", '"5"', "[]", "[5]", "{}", "0.30000000000000004", "-9999.99", "4.9e-324", "123456789012345678901e-19",
)  # fmt: skip


@settings(max_examples=600)
@given(st.data())
def test_with_anything_in_any_place_both_ways_take_the_same(data: st.DataObject):
    group = json.loads(json.dumps(SMALL))
    for name in data.draw(st.sets(st.sampled_from(sorted(SMALL)), max_size=6)):
        if name not in ("tokens", "masks", "scores"):
            del group[name]
    place: Any = group
    while True:
        key = data.draw(st.sampled_from(sorted(place) if isinstance(place, dict) else range(len(place))))
        if not isinstance(place[key], (dict, list)) or not place[key] or data.draw(st.integers(0, 3)) == 0:
            place[key] = "HERE"
            break
        place = place[key]
    body = json.dumps(group).replace('"HERE"', data.draw(st.sampled_from(NUMBERS))).encode()
    found = READER.read(body)
    if found is not None and (quick := frame(found)) is not None:
        assert quick == the_whole_way(body)


@settings(max_examples=300)
@given(at=st.integers(0, 5000), put=st.binary(min_size=1, max_size=4))
def test_torn_bodies_are_taken_as_the_whole_way_takes_them(at: int, put: bytes):
    whole = json.dumps(SMALL).encode()
    at %= len(whole)
    body = (whole[:at] + put + whole[at + len(put) :])[: len(whole)]
    found = READER.read(body)
    if found is not None and (quick := frame(found)) is not None:
        assert quick == the_whole_way(body)

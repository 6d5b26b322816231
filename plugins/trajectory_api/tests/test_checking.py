"""No frame from outside gets in that a trainer would stumble over, and none makes the server stumble."""

from __future__ import annotations

import json
import struct
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atropos_core.codec import encode_bytes
from atropos_core.codec.columns import GroupColumns
from atropos_core.errors import DataError
from atropos_core.group_schema import check_group
from atropos_core.hub.records import Label
from atropos_core.types import UNKNOWN_VERSION, Rollout, ScoredGroup, TopK
from atropos_trajectory_api.groups.fast_check import FrameColumns, check_typical_frame
from atropos_trajectory_api.groups.frame_check import check_frame, read_group
from plugins.trajectory_api.tests.sent_groups import VOCABULARY, drawn, group_of
from tests.placed_rewards import GROUPS as TURNED_GROUPS
from tests.placed_rewards import all_written
from tests.wrong_groups import NATIVE, VALUES, on_episode, on_rollout, unchecked
from tests.wrong_groups import group as wrong_group

GOOD = group_of(drawn(3))


def with_rollout(**changes: Any) -> ScoredGroup:
    first = GOOD.episodes[0]
    made = replace(first.rollouts[0], **changes)
    return replace(GOOD, episodes=(replace(first, rollouts=(made,)), *GOOD.episodes[1:]))


def test_a_group_comes_through_as_it_was_sent():
    read = read_group(encode_bytes(GOOD), VOCABULARY)
    assert read.draw == GOOD.draw and read.rewards.tolist() == GOOD.rewards.tolist()
    assert [e.rollouts[0].tokens.tolist() for e in read.episodes] == [
        e.rollouts[0].tokens.tolist() for e in GOOD.episodes
    ]


@settings(max_examples=60, deadline=None)
@given(TURNED_GROUPS)
def test_turn_rewards_come_through_bit_by_bit(group: ScoredGroup):
    frame = encode_bytes(group)
    check_frame(frame, 0)
    assert all_written(read_group(frame, 0)) == all_written(group)


T = len(GOOD.episodes[0].rollouts[0].tokens)
ZEROS = np.zeros(T, np.int32)
BAD = {
    "no group": {"a": 1},
    "a draw": GOOD.draw,
    "an id beyond the vocabulary": with_rollout(tokens=np.full(T, VOCABULARY, np.int32)),
    "an id below 0": with_rollout(tokens=np.full(T, -1, np.int32)),
    "a teacher's id beyond the vocabulary": with_rollout(
        teacher=TopK(np.arange(T + 1), np.full(T, VOCABULARY, np.int32), np.zeros(T, np.float32))
    ),
    "tokens of another type": with_rollout(tokens=np.zeros(T, np.int64)),
    "flags that are numbers": with_rollout(trained=ZEROS),
    "versions that are fractions": with_rollout(policy_version=np.zeros(T, np.float32)),
    "an advantage that is no number": with_rollout(advantages=np.full(T, np.nan, np.float32)),
    "a temperature that is text": with_rollout(temperature="hot"),
    "no tokens": replace(
        GOOD,
        episodes=(replace(GOOD.episodes[0], rollouts=(Rollout(ZEROS[:0], ZEROS[:0] > 0, ZEROS[:0] > 0, None, ZEROS[:0], 1.0),)),),
        rewards=np.zeros(1, np.float32),
    ),
    "no rollouts": replace(GOOD, episodes=(replace(GOOD.episodes[0], rollouts=()),), rewards=np.zeros(1, np.float32)),
    "no episodes": replace(GOOD, episodes=(), rewards=np.zeros(0, np.float32)),
    "rewards of another type": replace(GOOD, rewards=GOOD.rewards.astype(np.float64)),
    "parts that are too short": replace(GOOD, parts={"exact": np.zeros(1, np.float32)}),
    "metrics that are text": replace(GOOD, episodes=(replace(GOOD.episodes[0], metrics={"turns": "two"}), *GOOD.episodes[1:])),  # type: ignore[dict-item]
    "a draw that is text": replace(GOOD, draw="first"),  # type: ignore[arg-type]
    "a draw with a huge number": replace(GOOD, draw=replace(GOOD.draw, id=1 << 70)),
    "an environment with half a character": replace(GOOD, draw=replace(GOOD.draw, environment="a\ud800")),
    "a task with half a character": replace(GOOD, task=replace(GOOD.task, id="\udfff")),
    "a message with half a character": replace(GOOD, task=replace(GOOD.task, messages=({"content": ["\udc80"]},))),
    "half a character in a key": replace(GOOD, wire={"\ud83d": 1}),
    "an environment with a long name": replace(GOOD, draw=replace(GOOD.draw, environment="e" * 501)),
    "a task with a long id": replace(GOOD, task=replace(GOOD.task, id="t" * 501)),
    "a score that is no number": replace(GOOD, episodes=(replace(GOOD.episodes[0], score=float("nan")), *GOOD.episodes[1:])),
}  # fmt: skip


@pytest.mark.parametrize("wrong", BAD.values(), ids=BAD.keys())
def test_what_cannot_be_trained_is_refused(wrong: Any):
    with pytest.raises(DataError):
        read_group(encode_bytes(wrong), VOCABULARY)
    with pytest.raises(DataError):
        check_frame(encode_bytes(wrong), VOCABULARY)


def test_what_the_hub_must_know_of_a_frame_is_what_its_group_says():
    frame = encode_bytes(GOOD)
    assert check_frame(frame, VOCABULARY) == (GOOD.draw, Label.of(GOOD, len(frame)))


def taken(check: Any, frame: bytes) -> bool:
    try:
        check(frame, VOCABULARY)
    except DataError:
        return False
    return True


def test_text_of_any_script_is_taken_as_it_is():
    said = {"role": "user", "content": "ünï 漢字 😀 \\ud800 \\"}
    read = read_group(encode_bytes(replace(GOOD, task=replace(GOOD.task, id="täsk 😀", messages=(said,)))), VOCABULARY)
    assert (read.task.id, read.task.messages) == ("täsk 😀", (said,))


def test_bytes_that_are_no_utf8_in_a_header_are_refused():
    raw = FRAME[PREFIX.size :].replace(b'"words"', b'"w\xed\xa0\x80s"', 1)
    assert len(raw) == len(FRAME) - PREFIX.size
    with pytest.raises(DataError, match="half of a surrogate pair"):
        read_group(FRAME[: PREFIX.size] + raw, VOCABULARY)


def test_a_draw_whose_rollouts_all_failed_is_a_group_only_where_that_is_requested():
    none = replace(GOOD, episodes=(), rewards=np.zeros(0, np.float32))
    read_group(encode_bytes(none), VOCABULARY, episodes=False)


FRAME = encode_bytes(GOOD)
PREFIX = struct.Struct("<4sIQ")


@settings(max_examples=300)
@given(st.integers(0, len(FRAME) - 1), st.binary(min_size=1, max_size=8))
def test_flipped_bytes_are_refused_or_still_a_group(at: int, put: bytes):
    torn = (FRAME[:at] + put + FRAME[at + len(put) :])[: len(FRAME)]
    assert taken(check_frame, torn) == taken(read_group, torn)


def rich() -> ScoredGroup:
    """With whatever else an honest group has."""
    said = ({"role": "user", "content": "hé", "of": [1, {"a": None}]},)
    first, second, *rest = GOOD.episodes
    [of_first], [of_second] = first.rollouts, second.rollouts
    further = replace(of_first, tokens=of_first.tokens[::-1], policy_version=np.full(T, UNKNOWN_VERSION, np.int32))
    masked = replace(of_second, trained=np.zeros(T, bool), policy_version=np.full(T, 2, np.int32))
    episodes = (
        replace(first, rollouts=(of_first, further), messages=said, metrics={"turns": 2}, parts={"exact": 1.0}, correct=True),
        replace(second, rollouts=(masked,)),
        *rest,
    )  # fmt: skip
    task = replace(GOOD.task, messages=said, answer="14", data={"level": [1, 2.5]})
    return replace(GOOD, task=task, episodes=episodes, parts={"exact": GOOD.rewards})


FRAMES = (FRAME, encode_bytes(rich()))


def test_the_fast_check_names_the_columns_as_the_codec_does():
    assert FrameColumns._fields == tuple(field.name for field in fields(GroupColumns))


@pytest.mark.parametrize("frame", FRAMES, ids=["plain", "rich"])
def test_an_honest_group_passes_the_fast_check(frame: bytes):
    assert check_typical_frame(frame, VOCABULARY, 7) == check_frame(frame, VOCABULARY, 7)
    group = read_group(frame, VOCABULARY)
    assert check_typical_frame(frame, VOCABULARY, 7) == (group.draw, Label.of(group, len(frame)))


WORDS = st.sampled_from([None, True, -1, 0, 1.5, 1 << 70, "", "~a", [], {}, [[1]], {"~r": "Rollout", "~f": []}])


@settings(max_examples=300)
@given(st.data())
def test_a_header_with_anything_in_any_place_is_refused_or_still_a_group(data: st.DataObject):
    good = data.draw(st.sampled_from(FRAMES))
    _, length, size = PREFIX.unpack_from(good)
    header = json.loads(good[PREFIX.size : PREFIX.size + length])
    place = header
    while isinstance(place, (dict, list)) and place:
        key = data.draw(st.sampled_from(sorted(place) if isinstance(place, dict) else range(len(place))))
        if not isinstance(place[key], (dict, list)) or not place[key] or data.draw(st.booleans()):
            place[key] = data.draw(WORDS)
            break
        place = place[key]
    raw = json.dumps(header).encode()
    frame = PREFIX.pack(b"ATR1", len(raw), size) + raw + good[PREFIX.size + length :]
    assert taken(check_frame, frame) == taken(read_group, frame), "a quick look lets in what the whole check does not"


def test_rewards_that_lie_behind_the_end_of_a_frame_are_refused() -> None:
    _, length, size = PREFIX.unpack_from(FRAME)
    header = json.loads(FRAME[PREFIX.size : PREFIX.size + length])
    rewards = 20  # its place among the fields of a group
    assert 0 < header["~g"][rewards] < size
    header["~g"][rewards] = size
    raw = json.dumps(header).encode()
    frame = PREFIX.pack(b"ATR1", len(raw), size) + raw + FRAME[PREFIX.size + length :]
    assert check_typical_frame(frame, VOCABULARY, 7) is None
    with pytest.raises(DataError):
        check_frame(frame, VOCABULARY, 7)


@pytest.mark.parametrize("wrong", [*VALUES, *NATIVE, "a temperature of nan", "a score of nan"])
@pytest.mark.parametrize("turned", [False, True], ids=["first", "last"])
def test_the_fast_check_lets_nothing_in_that_the_schema_refuses(wrong: str, turned: bool) -> None:
    nan = {"a temperature of nan": on_rollout(temperature=np.nan), "a score of nan": on_episode(score=np.nan)}
    made = (nan.get(wrong) or (VALUES | NATIVE)[wrong][0])(wrong_group())
    if turned:
        made = unchecked(made, episodes=made.episodes[::-1])
    with pytest.raises(DataError):
        check_group(made, VOCABULARY)
    assert check_typical_frame(encode_bytes(made), VOCABULARY, None) is None
    assert check_typical_frame(encode_bytes(wrong_group()), VOCABULARY, None) is not None

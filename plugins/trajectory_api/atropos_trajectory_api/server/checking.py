"""Frames from outside -> records, checked once on arrival (`atropos_core.group_schema`) and trusted afterwards."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

from atropos_core.codec import PREFIX_BYTES, Buffer, decode
from atropos_core.errors import DataError
from atropos_core.group_schema import check_group
from atropos_core.hub.records import Label
from atropos_core.rollouts.policy_versions import refuse_versions_that_never_were
from atropos_core.types import Draw, ScoredGroup
from atropos_trajectory_api.native.quick_look import surely_right

EXPANSION = 16  # how many times its frame's length a group's columns may hold: an honest one holds less than twice that
SPARE_BYTES = 1 << 16  # and beside that: a short group may be all one token
_HEADER_LENGTH = slice(4, 8)  # of a frame


def read_frame(frame: Buffer, *, most_bytes: int | None = None) -> Any:
    """The value of a frame from outside. Raises DataError, also where a text in it is no Unicode text (half of a
    surrogate pair): whoever writes that down later fails, in somebody else's call."""
    value = decode(frame, most_bytes=most_bytes)
    view = memoryview(frame)
    header = bytes(view[PREFIX_BYTES : PREFIX_BYTES + int.from_bytes(view[_HEADER_LENGTH], "little")])
    if not header.isascii() or b"\\ud" in header or b"\\uD" in header:  # else there is none for sure
        try:
            json.dumps(json.loads(header), ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            raise DataError(
                f"what was sent cannot be taken: a text holds {error.object[error.start]!a}, half of a surrogate pair",
                remedy="Send text that can be encoded as UTF-8.",
            ) from None
    return value


class Checked(NamedTuple):
    """What the hub must know of a frame."""

    draw: Draw
    label: Label


def check_frame(frame: bytes, vocabulary: int, newest_version: int | None = None) -> Checked:
    """Of the frame of a group. Raises DataError that says what is wrong with it. A `vocabulary` of 0 is not known;
    `newest_version` as `refuse_versions_that_never_were` has it."""
    found = surely_right(frame, vocabulary, newest_version)
    if found is not None:
        return Checked(*found)
    group = read_group(frame, vocabulary)
    refuse_versions_that_never_were(group, newest_version)
    return Checked(group.draw, Label.of(group, len(frame)))


def read_group(frame: Buffer, vocabulary: int, *, episodes: bool = True) -> ScoredGroup:
    """The group of this frame. Raises DataError that says what is wrong with it. A `vocabulary` of 0 is not known;
    without `episodes`, one in which every rollout failed will do."""
    group = read_frame(frame, most_bytes=SPARE_BYTES + EXPANSION * len(frame))
    check_group(group, vocabulary, episodes=episodes)
    assert isinstance(group, ScoredGroup), "checked"
    return group

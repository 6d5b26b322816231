"""Turn frames from outside into records, checked once on arrival (`atropos_core.group_schema`) and trusted afterwards."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

from atropos_core.codec import PREFIX, PREFIX_BYTES, Buffer, decode
from atropos_core.errors import DataError
from atropos_core.group_schema import check_group, check_kept_is_known
from atropos_core.hub.records import Label
from atropos_core.rollouts.policy_versions import check_versions
from atropos_core.types import Draw, ScoredGroup
from atropos_trajectory_api.groups.fast_check import LONG_HEADER, check_typical_frame
from atropos_trajectory_api.json_in_turns import loads_in_turns

EXPANSION = 16  # how many times its frame's length a group's columns may hold: an honest one holds less than twice that
SPARE_BYTES = 1 << 16  # allowed in addition, since a short group may be all one token
MOST_LISTS = 1_000_000  # and mappings, in a header: an empty one of three characters takes 64 bytes once it is read
MOST_VALUES = 2_000_000
MOST_ENTRIES = 100_000  # of one mapping in a long header
_WRITER = json.JSONEncoder(ensure_ascii=False)  # whose `iterencode` is written in Python


def read_frame(frame: Buffer, *, most_bytes: int | None = None) -> Any:
    """The value of a frame from outside. Raises DataError, also if a text in it is not valid Unicode (half of a surrogate pair):
    writing that text would fail later, in another client's call."""
    return decode(frame, most_bytes=most_bytes, loads=_header)


def _header(text: str) -> Any:
    """Read a header. Other threads get turns while a long one is read. Raises DataError, and what `json.loads` raises."""
    is_long = len(text) > LONG_HEADER
    if is_long and ((lists := text.count("[") + text.count("{")) > MOST_LISTS or text.count(",") > MOST_VALUES):
        raise DataError(
            f"the header of a frame holds {lists:,} lists and mappings, and {text.count(','):,} commas, but at most {MOST_LISTS:,} and "
            f"{MOST_VALUES:,} are read.",
            remedy="Send fewer groups at once.",
        )
    value = loads_in_turns(text, object_pairs_hook=_mapping) if is_long else json.loads(text)
    if not text.isascii() or "\\ud" in text or "\\uD" in text:  # otherwise there surely is none
        try:
            for piece in _WRITER.iterencode(value) if is_long else (json.dumps(value, ensure_ascii=False),):
                piece.encode()
        except UnicodeEncodeError as error:
            raise DataError(
                f"what was sent cannot be used: a text holds {error.object[error.start]!a}, half of a surrogate pair",
                remedy="Send text that can be encoded as UTF-8.",
            ) from None
    return value


def has_long_header(frame: Buffer) -> bool:
    """Return True if the frame takes long to read. False also for bytes that are not a frame."""
    return len(frame) > PREFIX_BYTES and PREFIX.unpack_from(frame)[1] > LONG_HEADER


def _mapping(entries: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(entries) > MOST_ENTRIES:  # making it would hold Python's lock
        raise DataError(f"a mapping has {len(entries):,} entries, but at most {MOST_ENTRIES:,} are read.")
    return dict(entries)


class Checked(NamedTuple):
    """A checked group, as far as the hub must know it."""

    draw: Draw | None  # None: a group of an old client, which has no draws
    label: Label


def check_frame(frame: bytes, vocabulary: int, newest_version: int | None = None) -> Checked:
    """Check the frame of a group. Raises DataError that says what is wrong with it. A `vocabulary` of 0 is unknown;
    `newest_version` as in `check_versions`."""
    found = check_typical_frame(frame, vocabulary, newest_version)
    if found is not None:
        return Checked(*found)
    group = read_group(frame, vocabulary)
    check_versions(group, newest_version)
    return Checked(group.draw, Label.of(group, len(frame)))


def read_group(frame: Buffer, vocabulary: int, *, episodes: bool = True) -> ScoredGroup:
    """The group of this frame. Raises DataError that says what is wrong with it. A `vocabulary` of 0 is unknown. If not
    `episodes`, a group in which every rollout failed is accepted."""
    group = read_frame(frame, most_bytes=SPARE_BYTES + EXPANSION * len(frame))
    check_group(group, vocabulary, episodes=episodes)
    assert isinstance(group, ScoredGroup), "checked"
    check_kept_is_known(group)
    return group

"""A frame that holds a group as nearly all do is read and checked here without making anything of it.

What passes would also pass the whole way (`checking.check_frame`: decode, `check_group`, the versions), which a test holds it
to; what does not is put to that, which says what is wrong. At 8 kB it takes 20 us where the whole way takes 130, and a ring
would bring ten times what that can read.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import orjson

from atropos_core.codec import MAGIC, PREFIX
from atropos_core.errors import DataError
from atropos_core.group_schema import (
    ID_BOUND,
    LARGEST_METRIC,
    LARGEST_REWARD,
    LEAST_TEMPERATURE,
    LOGPROB_ROUNDING,
    LOWEST_LOGPROB,
    MAX_DEPTH,
    MOST_CHARACTERS,
    MOST_TEMPERATURE,
    NUMBER_BOUND,
    SPLITS,
    check_metric_name,
    check_part_name,
)
from atropos_core.hub.records import Label
from atropos_core.types import UNKNOWN_VERSION, Draw

_WHOLE, _TEXT, _FLAGS, _REAL, _NUMBERS = {int}, {str}, {bool}, {float}, {int, float}
_VERDICTS = {bool, type(None)}
_RECORD = ["~r", "~f"]
_NO_TUPLE: dict[str, list[Any]] = {"~t": []}
_lowest, _highest = np.minimum.reduce, np.maximum.reduce


def surely_right(frame: bytes, vocabulary: int, newest_version: int | None) -> tuple[Draw, Label] | None:
    """What the hub must know of the frame; None where it has to be looked at more closely."""
    try:
        return _look(frame, vocabulary, newest_version)
    except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, DataError):
        return None


def _look(frame: bytes, vocabulary: int, newest_version: int | None) -> tuple[Draw, Label] | None:
    if len(frame) < PREFIX.size:
        return None
    magic, header_bytes, body_bytes = PREFIX.unpack_from(frame)
    start = PREFIX.size + header_bytes
    if magic != MAGIC or len(frame) != start + body_bytes:
        return None
    header = orjson.loads(memoryview(frame)[PREFIX.size : start])
    if len(header) != 1:
        return None
    (
        (number, environment, split, index, seed), task, rollouts, lengths, tokens, sampled, trained, versions, logprobs,
        advantages, reference, lacking, temperature, truncated, sft, teachers, scores, correct, finish, details, rewards,
        parts, failed, given, wire,
    ) = header["~g"]  # fmt: skip
    total, sequences, episodes = sum(lengths), len(lengths), len(scores)
    if not (
        advantages is reference is teachers is given is None
        and lacking == wire == {}
        and failed == _NO_TUPLE
        and {
            type(number),
            type(index),
            type(seed),
            *map(type, lengths),
            *map(type, rollouts),
            *map(type, versions),
            type(tokens),
            type(sampled),
            type(rewards),
        }
        == _WHOLE
        and -NUMBER_BOUND <= min(number, index, seed) <= max(number, index, seed) < NUMBER_BOUND
        and {type(environment), *map(type, finish)} == _TEXT
        and max(len(environment), *map(len, finish)) <= MOST_CHARACTERS
        and split in SPLITS
        and min(lengths) > 0 < min(rollouts)
        and sum(rollouts) * (1 if len(rollouts) == episodes else episodes) == sequences == len(versions)
        and {
            type(values)
            for values in (lengths, rollouts, versions, temperature, truncated, sft, scores, correct, finish)
        }
        == {list}
        and _ones(episodes, rollouts, correct, finish)
        and _ones(sequences, temperature, truncated, sft)
        and {*map(type, temperature)} == _REAL
        and LEAST_TEMPERATURE <= min(temperature) <= max(temperature) <= MOST_TEMPERATURE
        and {*map(type, truncated), *map(type, sft)} == _FLAGS
        and {*map(type, scores)} <= _NUMBERS
        and -LARGEST_REWARD <= min(scores) <= max(scores) <= LARGEST_REWARD
        and {*map(type, correct)} <= _VERDICTS
        and min(tokens, sampled, rewards) >= 0
        and _highest(np.frombuffer(frame, np.uint32, total, start + tokens)) < (vocabulary or ID_BOUND)
    ):
        return None
    if logprobs is not None:
        values = np.frombuffer(frame, np.float32, total, start + logprobs)
        if (
            type(logprobs) is not int
            or logprobs < 0
            or not (_lowest(values) >= LOWEST_LOGPROB and _highest(values) <= LOGPROB_ROUNDING)
        ):
            return None
    bits = np.frombuffer(frame, np.uint8, (total + 7) // 8, start + sampled)
    if trained is not None:
        counted = np.frombuffer(frame, np.uint8, (total + 7) // 8, start + trained)
        if type(trained) is not int or trained < 0 or np.count_nonzero(counted & ~bits):
            return None
    for at in (rewards, *(_part_at(name, mark, episodes) for name, mark in parts.items())):
        if at < 0 or not _are_rewards(np.frombuffer(frame, np.float32, episodes, start + at).tolist()):
            return None
    name, messages, answer, data = task["~f"]
    if not (
        [*task] == _RECORD
        and task["~r"] == "Task"
        and type(name) is str
        and len(name) <= MOST_CHARACTERS
        and (answer is None or type(answer) is str)
        and _are_messages(messages)
        and (data == {} or (type(data) is dict and _is_plain(data, MAX_DEPTH - 1)))
        and (details is None or (_ones(episodes, details) and all(map(_is_plain_detail, details))))
    ):
        return None
    highest = ID_BOUND - 1 if newest_version is None else newest_version
    if not UNKNOWN_VERSION <= min(versions) <= max(versions) <= highest:
        return None
    oldest = _oldest(versions, lengths, bits, total)
    label = Label(environment, sequences, len(frame), oldest, number if number >= 0 else None, name)
    return Draw(number, environment, split, index, seed), label


def _ones(count: int, *lists: list[Any]) -> bool:
    """Each has so many entries, or one that stands for all."""
    return {count, *map(len, lists)} <= {count, 1}


def _are_rewards(values: list[float]) -> bool:
    """Within bounds; a sum with nan in it is no number, and what `min` and `max` say of nan depends on where it stands."""
    total = sum(values)
    return total == total and min(values) >= -LARGEST_REWARD and max(values) <= LARGEST_REWARD


def _oldest(versions: list[int], lengths: list[int], bits: np.ndarray[Any, Any], total: int) -> int | None:
    """Of sampled tokens."""
    if min(versions) == max(versions):
        sampled = bits if total % 8 == 0 else np.unpackbits(bits, count=total)
        return versions[0] if versions[0] != UNKNOWN_VERSION and np.count_nonzero(sampled) else None
    flags = np.unpackbits(bits, count=total).view(np.bool_)
    of_sampled = np.repeat(versions, lengths)[flags]
    known = of_sampled[of_sampled != UNKNOWN_VERSION]
    return int(known.min()) if len(known) else None


def _part_at(name: str, mark: dict[str, Any], episodes: int) -> int:
    check_part_name(name)
    dtype, shape, at = mark["~a"]
    return int(at) if (dtype, shape, len(mark)) == ("<f4", [episodes], 1) and type(at) is int else -1


def _is_plain_detail(detail: dict[str, Any]) -> bool:
    parts, metrics, messages = detail["~t"]
    return (
        len(detail) == 1
        and _are_numbers(parts, check_part_name, LARGEST_REWARD)
        and _are_numbers(metrics, check_metric_name, LARGEST_METRIC)
        and _are_messages(messages)
    )


def _are_numbers(given: dict[str, Any], check: Callable[[Any], None], most: float) -> bool:
    for name in given:
        check(name)
    return {*map(type, given.values())} <= _NUMBERS and all(-most <= value <= most for value in given.values())


def _are_messages(given: dict[str, Any]) -> bool:
    if given == _NO_TUPLE:
        return True
    return len(given) == 1 and all(
        type(message) is dict and _is_plain(message, MAX_DEPTH - 1) for message in given["~t"]
    )


def _is_plain(value: dict[str, Any] | list[Any], depth: int) -> bool:
    """Text, numbers, lists and mappings, with no mark of the codec's among them."""
    entries: Any = value
    if type(value) is dict:
        if any(key[:1] == "~" for key in value):
            return False
        entries = value.values()
    return all(type(entry) not in (dict, list) or (depth > 0 and _is_plain(entry, depth - 1)) for entry in entries)

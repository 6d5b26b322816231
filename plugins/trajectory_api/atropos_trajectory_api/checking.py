"""Whether records from outside are what they must be: checked once, at the door, and trusted afterwards."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np

from atropos_core.codec import PREFIX_BYTES, Buffer, decode
from atropos_core.errors import DataError
from atropos_core.types import Draw, Episode, Failed, Rollout, Sampling, ScoredGroup, Task, TopK

_COLUMNS = {
    "tokens": np.dtype(np.int32),
    "sampled": np.dtype(np.bool_),
    "trained": np.dtype(np.bool_),
    "policy_version": np.dtype(np.int32),
    "logprobs": np.dtype(np.float32),
    "advantages": np.dtype(np.float32),
    "ref_logprobs": np.dtype(np.float32),
}
_OPTIONAL = ("logprobs", "advantages", "ref_logprobs")
_TEACHER = (np.dtype(np.int64), np.dtype(np.int32), np.dtype(np.float32))
_INT31 = 1 << 31
EXPANSION = 16  # how many times its frame's length a group's columns may hold: an honest one holds less than twice that
SPARE_BYTES = 1 << 16  # and beside that: a short group may be all one token
_INT64 = 1 << 63
MOST_CHARACTERS = 500  # of a name that the server keeps for every group: an environment, a task's id
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


def read_group(frame: Buffer, vocabulary: int, *, episodes: bool = True) -> ScoredGroup:
    """The group of this frame. Raises DataError that says what is wrong with it. A `vocabulary` of 0 is not known;
    without `episodes`, one in which every play failed will do."""
    group = read_frame(frame, most_bytes=SPARE_BYTES + EXPANSION * len(frame))
    check_group(group, vocabulary, episodes=episodes)
    assert isinstance(group, ScoredGroup), "checked"
    return group


def check_group(group: Any, vocabulary: int, *, episodes: bool = True) -> None:
    """Raises DataError. Records check the shapes of their columns themselves; what a frame could still get wrong is the
    type of everything."""
    if not isinstance(group, ScoredGroup):
        raise DataError(f"the frame holds a {type(group).__name__}, not a ScoredGroup")
    task = group.task
    check_draw(group.draw)
    _must(isinstance(task, Task) and isinstance(task.id, str), "its task is none")
    _must(len(task.id) <= MOST_CHARACTERS, f"its task's id is longer than {MOST_CHARACTERS} characters")
    _must(_messages(task.messages), "its task has no messages")
    _must(task.answer is None or isinstance(task.answer, str), "its task's answer is no text")
    _must(isinstance(task.data, Mapping), "its task's data must be a mapping")
    _must(isinstance(group.episodes, tuple) and bool(group.episodes or not episodes), "it has no episodes")
    _must(_floats(group.rewards, len(group.episodes)), "its rewards must be float32, one an episode")
    _must(group.advantages is None or _floats(group.advantages, len(group.episodes)), "its advantages must be float32")
    _must(isinstance(group.parts, Mapping), "its parts must be a mapping")
    _must(all(_floats(part, len(group.episodes)) for part in group.parts.values()), "each part must be float32")
    _must(isinstance(group.wire, Mapping), "`wire` must be a mapping")
    _must(isinstance(group.failed, tuple) and all(map(_is_failure, group.failed)), "`failed` must hold failures")
    for episode in group.episodes:
        _must(isinstance(episode, Episode), "an episode is none")
        _must(type(episode.score) in (int, float) and abs(episode.score) < np.inf, "a score must be a finite number")
        _must(isinstance(episode.rollouts, tuple) and bool(episode.rollouts), "an episode has no rollouts")
        _must(_messages(episode.messages), "an episode's messages must be mappings")
        _must(_numbers(episode.parts) and _numbers(episode.metrics), "parts and metrics must be finite numbers by name")
        _must(episode.correct is None or type(episode.correct) is bool, "`correct` is no bool")
        _must(isinstance(episode.finish, str), "`finish` is no text")
        for rollout in episode.rollouts:
            _check_rollout(rollout, vocabulary)


def check_draw(draw: Any) -> None:
    """Raises DataError."""
    _must(isinstance(draw, Draw), f"a {type(draw).__name__} is no draw")
    whole = (draw.id, draw.index, draw.seed)
    _must(all(type(number) is int and -_INT64 <= number < _INT64 for number in whole), "a draw's numbers must be whole")
    _must(
        isinstance(draw.environment, str) and draw.split in ("train", "test"), "a draw names no environment and split"
    )
    _must(len(draw.environment) <= MOST_CHARACTERS, f"an environment's name has more than {MOST_CHARACTERS} characters")


def check_sampling(sampling: Any) -> None:
    """Raises DataError."""
    _must(isinstance(sampling, Sampling), f"a {type(sampling).__name__} says nothing of sampling")
    _must(type(sampling.max_tokens) is int and 0 < sampling.max_tokens < 1 << 31, "max_tokens must be 1 or more")
    _must(type(sampling.top_k) is int and 0 <= sampling.top_k < 1 << 31, "top_k must be 0 or more")
    for name, most in (("temperature", 1e6), ("top_p", 1.0)):
        value = getattr(sampling, name)
        _must(type(value) in (int, float) and 0 <= value <= most, f"{name} must be a number from 0 to {most:g}")


def _check_rollout(rollout: Any, vocabulary: int) -> None:
    _must(isinstance(rollout, Rollout), "a rollout is none")
    for name, dtype in _COLUMNS.items():
        column = getattr(rollout, name)
        if column is None and name in _OPTIONAL:
            continue
        if type(column) is not np.ndarray or column.dtype != dtype:
            raise DataError(f"rollout column {name!r} must be {dtype}, not {getattr(column, 'dtype', type(column))}")
    _must(type(rollout.temperature) in (int, float) and 0 <= rollout.temperature < np.inf, "a temperature is below 0")
    _must(rollout.tokens.ndim == 1 and len(rollout.tokens) > 0, "a rollout has no tokens")
    highest = int(rollout.tokens.view(np.uint32).max())  # one pass for both ends: below 0 is above them all
    if (teacher := rollout.teacher) is not None:
        _must(isinstance(teacher, TopK), "a teacher is none")
        columns = (teacher.offsets.dtype, teacher.token_ids.dtype, teacher.logprobs.dtype)
        _must(columns == _TEACHER, "a teacher's columns must be int64, int32 and float32")
        highest = max(highest, int(teacher.token_ids.max(initial=0)))
    if highest >= (vocabulary or _INT31):
        raise DataError(
            f"token id {highest if highest < _INT31 else highest - 2 * _INT31} is outside the policy's vocabulary"
            + (f" of {vocabulary}" if vocabulary else ""),
            remedy="Give the worker the policy's own tokenizer.",
        )
    _must(type(rollout.truncated) is bool and type(rollout.sft) is bool, "a flag of a rollout is no bool")
    _must(rollout.advantages is None or bool(np.isfinite(rollout.advantages).all()), "an advantage is not finite")


def _messages(given: Any) -> bool:
    return isinstance(given, tuple) and all(isinstance(message, Mapping) for message in given)


def _numbers(given: Any) -> bool:
    return isinstance(given, Mapping) and all(type(n) in (int, float) and abs(n) < np.inf for n in given.values())


def _is_failure(given: Any) -> bool:
    return isinstance(given, Failed) and all(isinstance(text, str) for text in (given.cause, given.where, given.trace))


def _floats(values: Any, length: int) -> bool:
    """f32[length], all finite."""
    right = isinstance(values, np.ndarray) and values.dtype == np.float32 and values.shape == (length,)
    return right and bool(np.isfinite(values).all())


def _must(holds: bool, otherwise: str) -> None:
    if not holds:
        raise DataError(f"what was sent cannot be taken: {otherwise}")

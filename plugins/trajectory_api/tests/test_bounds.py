"""A frame's two readers, the quick look and the whole check, draw each bound at the same value: the schema's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from atropos_core import group_schema
from atropos_core.codec import encode_bytes
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
    MOST_KEPT,
    MOST_NAME,
    MOST_TEMPERATURE,
    MOST_TIES,
    NUMBER_BOUND,
    SPLITS,
)
from atropos_core.rollouts.policy_versions import check_versions
from atropos_core.types import UNKNOWN_VERSION, Draw, Kept, ScoredGroup, Task
from atropos_trajectory_api.groups.fast_check import check_typical_frame
from atropos_trajectory_api.groups.frame_check import read_group
from tests.wrong_groups import LENGTH, VOCABULARY, column, group, nested, on_episode, on_group, on_rollout, unchecked

NEWEST = 7  # version that engines can have sampled from
F = np.float32


def above(value: float) -> float:
    """The next number of 32 bits."""
    return float(np.nextafter(F(value), F(np.inf)))


def below(value: float) -> float:
    return float(np.nextafter(F(value), F(-np.inf)))


def draw(**changes: Any) -> ScoredGroup:
    return on_group(draw=unchecked(Draw(0, "words", "train", 0, 0), **changes))(group())


def task(**changes: Any) -> ScoredGroup:
    return on_group(task=unchecked(Task("t", ()), **changes))(group())


def rewards(value: float) -> ScoredGroup:
    return on_group(rewards=np.array([0, value], F))(group())


def parts(value: float) -> ScoredGroup:
    return on_group(parts={"exact": np.array([0, value], F)})(group())


def named_part(name: str) -> ScoredGroup:
    return on_group(parts={name: np.zeros(2, F)})(group())


def score(value: float) -> ScoredGroup:
    return on_episode(score=value)(group())


def part_of_episode(value: float) -> ScoredGroup:
    return on_episode(parts={"exact": value})(group())


def metric(value: float) -> ScoredGroup:
    return on_episode(metrics={"turns": value})(group())


def named_metric(name: str) -> ScoredGroup:
    return on_episode(metrics={name: 1.0})(group())


def finish(text: str) -> ScoredGroup:
    return on_episode(finish=text)(group())


def logprob(value: float) -> ScoredGroup:
    return on_rollout(logprobs=column(value))(group())


def temperature(value: float) -> ScoredGroup:
    return on_rollout(temperature=value)(group())


def token(value: int) -> ScoredGroup:
    return on_rollout(tokens=np.full(LENGTH, value, np.int32))(group())


def version(value: int) -> ScoredGroup:
    return on_rollout(policy_version=np.full(LENGTH, value, np.int32))(group())


def cut(kept: int) -> ScoredGroup:
    """The last token was sampled from this many."""
    sizes = np.zeros(LENGTH, np.int32)
    sizes[-1] = kept
    return on_rollout(truncated=True, kept=Kept(sizes, np.arange(kept, dtype=np.int32)))(group())


def data(depth: int) -> ScoredGroup:
    return task(data=nested(depth))


def message(depth: int) -> ScoredGroup:
    return task(messages=({"role": "user", "content": nested(depth)},))


Make = Callable[[Any], ScoredGroup]
# Of each bound: what has such a value, the value on it, and the next one beyond.
NUMBERS = [
    (name, lambda value, name=name: draw(**{name: value}), on, beyond)
    for name in ("id", "index", "seed")
    for on, beyond in ((NUMBER_BOUND - 1, NUMBER_BOUND), (-NUMBER_BOUND, -NUMBER_BOUND - 1))
]
REWARDS = [
    (make.__name__, make, on, beyond)
    for make in (rewards, parts, score, part_of_episode)
    for on, beyond in ((LARGEST_REWARD, above(LARGEST_REWARD)), (-LARGEST_REWARD, below(-LARGEST_REWARD)))
]
NAMES: list[tuple[str, Make, Any, Any]] = [
    (what, make, "e" * most, "e" * (most + 1))
    for what, make, most in (
        ("environment", lambda value: draw(environment=value), MOST_CHARACTERS),
        ("task", lambda value: task(id=value), MOST_CHARACTERS),
        ("finish", finish, MOST_CHARACTERS),
        ("named_part", named_part, MOST_NAME),
        ("named_metric", named_metric, MOST_NAME),
    )
]
BOUNDS: list[tuple[str, Make, Any, Any]] = [
    *NUMBERS,
    *REWARDS,
    *NAMES,
    ("metric", metric, LARGEST_METRIC, LARGEST_METRIC * 1.001),
    ("metric", metric, -LARGEST_METRIC, -LARGEST_METRIC * 1.001),
    ("logprob", logprob, LOGPROB_ROUNDING, above(LOGPROB_ROUNDING)),
    ("logprob", logprob, LOWEST_LOGPROB, below(LOWEST_LOGPROB)),
    ("temperature", temperature, LEAST_TEMPERATURE, np.nextafter(LEAST_TEMPERATURE, 0).item()),
    ("temperature", temperature, MOST_TEMPERATURE, np.nextafter(MOST_TEMPERATURE, np.inf).item()),
    ("token", token, VOCABULARY - 1, VOCABULARY),
    ("token", token, 0, -1),
    ("version", version, NEWEST, NEWEST + 1),
    ("version", version, UNKNOWN_VERSION, UNKNOWN_VERSION - 1),
    ("data", data, MAX_DEPTH - 1, MAX_DEPTH),  # what is nested so many times is in a mapping
    ("message", message, MAX_DEPTH - 2, MAX_DEPTH - 1),  # and a message is one more
    *(("split", lambda value: draw(split=value), split, split + "s") for split in SPLITS),
]


def verdicts(made: ScoredGroup, vocabulary: int = VOCABULARY, newest: int | None = NEWEST) -> tuple[bool, bool]:
    """Of the quick look, and of the whole check."""
    frame = encode_bytes(made)
    try:
        check_versions(read_group(frame, vocabulary), newest)
        whole = True
    except DataError:
        whole = False
    return check_typical_frame(frame, vocabulary, newest) is not None, whole


@pytest.mark.parametrize(("make", "on", "beyond"), [row[1:] for row in BOUNDS], ids=[row[0] for row in BOUNDS])
def test_what_is_on_a_bound_passes_both_readers_and_the_next_value_beyond_passes_neither(
    make: Make, on: Any, beyond: Any
):
    assert verdicts(make(on)) == (True, True)
    assert verdicts(make(beyond)) == (False, False)


def test_where_neither_vocabulary_nor_version_is_known_any_of_32_bits_passes_both_readers():
    for make in (token, version):
        assert verdicts(make(ID_BOUND - 1), 0, None) == (True, True)


def test_the_most_tokens_that_can_be_kept_pass_the_whole_check_which_alone_reads_them_and_one_more_does_not():
    most = MOST_KEPT + MOST_TIES
    assert verdicts(cut(most), 0) == (False, True)
    assert verdicts(cut(most + 1), 0) == (False, False)


def test_no_bound_of_the_schema_is_left_out():
    bounds = {
        name for name, value in vars(group_schema).items() if name.isupper() and type(value) in (int, float, tuple)
    }
    elsewhere = {
        "LOOK_S",
        "RUN_SECTIONS",
        "UNKNOWN_VERSION",
        "MOST_STOP_IDS",
        "MOST_STOPS",
    }  # no bounds of a group's values
    assert {name for name in bounds - elsewhere if name[0] != "_"} <= set(globals())

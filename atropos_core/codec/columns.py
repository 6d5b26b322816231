"""A scored group as columns: one array for all of its rollouts, one list for all of its episodes.

It is written, sent and checked in this form: five arrays instead of forty arrays of a few hundred entries each. The trainer gets a
`ScoredGroup` made from it, whose arrays are views of these.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from operator import attrgetter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from atropos_core.errors import DataError
from atropos_core.types import (
    Bools,
    Draw,
    Episode,
    Failed,
    Floats,
    Kept,
    Message,
    Rollout,
    RoutedExperts,
    ScoredGroup,
    Task,
    Tokens,
    TopK,
    TurnRewards,
    Versions,
)

Details = tuple[
    Mapping[str, float], Mapping[str, float], tuple[Message, ...]
]  # parts, metrics and messages of an episode
OPTIONAL = ("logprobs", "advantages", "ref_logprobs")
_DTYPES = {
    "tokens": np.dtype(np.int32), "sampled": np.dtype(np.bool_), "trained": np.dtype(np.bool_),
    "policy_version": np.dtype(np.int32), **dict.fromkeys(OPTIONAL, np.dtype(np.float32)),
}  # fmt: skip


_ARRAYS = attrgetter(*_DTYPES)


@dataclass(slots=True)
class GroupColumns:
    """G episodes of S rollouts with N tokens in total. Raises DataError if the columns do not fit one another."""

    draw: Draw
    task: Task
    rollouts: list[int]  # [G] how many each episode has
    lengths: list[int]  # [S]
    tokens: Tokens  # [N]
    sampled: Bools  # [N]
    trained: Bools  # [N] the same array as `sampled` if they are equal
    policy_version: Versions  # [N]
    logprobs: Floats | None  # [N] 0 if the rollout has none
    advantages: Floats | None  # [N] as above
    ref_logprobs: Floats | None  # [N] as above
    lacking: Mapping[str, list[bool]]  # [S] for each of these three that some rollouts have and others have not
    temperature: list[float]  # [S]
    truncated: list[bool]  # [S]
    sft: list[bool]  # [S]
    teachers: list[TopK | None] | None  # [S]
    scores: list[float]  # [G]
    correct: list[bool | None]  # [G]
    finish: list[str]  # [G]
    details: list[Details] | None  # [G] None: there are none
    rewards: Floats  # [G]
    parts: Mapping[str, Floats]  # [G] each
    failed: tuple[Failed, ...]
    group_advantages: Floats | None  # [G]
    wire: Mapping[str, Any]
    kept: list[Kept | None] | None = None  # [S] written only if there are any
    experts: list[RoutedExperts | None] | None = None  # [S] as above
    turns: list[TurnRewards | None] | None = None  # [S] as above
    turn_order: list[NDArray[np.int64] | None] | None = None  # [S] as above

    def __post_init__(self) -> None:
        rollouts, lengths = self.rollouts, self.lengths
        if (
            {*map(type, rollouts), *map(type, lengths)} - {int}
            or min(lengths, default=0) < 0
            or min(rollouts, default=0) < 0
        ):
            raise DataError("a group whose rollouts and tokens are not counted is refused")
        if sum(rollouts) != len(lengths):
            raise DataError(f"episodes of {sum(rollouts)} rollouts together, but there are {len(lengths)}")

    def refuse_other_types(self) -> None:
        """Raises DataError for columns from outside that have a wrong type."""
        if self.teachers is not None and {*map(type, self.teachers)} - {TopK, type(None)}:
            raise DataError("a group has a teacher that is none")
        if self.kept is not None and {*map(type, self.kept)} - {Kept, type(None)}:
            raise DataError("a group has kept tokens that are none")
        if self.experts is not None and {*map(type, self.experts)} - {RoutedExperts, type(None)}:
            raise DataError("a group has routed experts that are none")
        if self.turns is not None and {*map(type, self.turns)} - {TurnRewards, type(None)}:
            raise DataError("a group has turn rewards that are none")
        if self.turn_order is not None and {*map(type, self.turn_order)} - {np.ndarray, type(None)}:
            raise DataError("a group has a turn order that is none")
        if self.details is not None and any(type(one) is not tuple or len(one) != 3 for one in self.details):
            raise DataError("an episode has parts, metrics and messages, or nothing")
        if type(self.rewards) is not np.ndarray:
            raise DataError("a group has no rewards")
        shape = (sum(self.lengths),)
        for name, dtype, column in zip(_DTYPES, _DTYPES.values(), _ARRAYS(self), strict=True):
            if column is None and name in OPTIONAL:
                continue
            if type(column) is not np.ndarray or column.dtype != dtype or column.shape != shape:
                raise DataError(
                    f"rollout column {name!r} must be {dtype}[{shape[0]}], not {getattr(column, 'dtype', type(column))} "
                    f"of shape {getattr(column, 'shape', None)}"
                )

    @classmethod
    def of(cls, group: ScoredGroup) -> GroupColumns | None:
        """Return the columns, or None if a column has the wrong type, so that it is not a group, or if rollouts share one array of
        tokens, which is written only once as records."""
        episodes = group.episodes
        if type(group.draw) is not Draw or type(episodes) is not tuple or not episodes:
            return None
        if not all(type(one) is Episode for one in episodes):
            return None
        rollouts = [rollout for episode in episodes for rollout in episode.rollouts]
        if not rollouts or not all(type(one) is Rollout for one in rollouts):
            return None
        if len({id(one.tokens) for one in rollouts}) < len(rollouts):
            return None
        found: dict[str, Any] = {}
        lacking: dict[str, list[bool]] = {}
        for name, dtype in _DTYPES.items():
            if name == "trained" and all(one.trained is one.sampled for one in rollouts):
                found[name] = found["sampled"]
                continue
            columns = [getattr(one, name) for one in rollouts]
            if name in OPTIONAL:
                absent = [column is None for column in columns]
                if all(absent):
                    found[name] = None
                    continue
                if any(absent):
                    lacking[name] = absent
                    columns = [
                        np.zeros(len(one.tokens), dtype) if column is None else column
                        for one, column in zip(rollouts, columns, strict=True)
                    ]
            for column in columns:
                if type(column) is not np.ndarray or column.dtype != dtype or column.ndim != 1:
                    return None
            found[name] = np.concatenate(columns)
        has_teacher = any(one.teacher is not None for one in rollouts)
        has_details = any(one.parts or one.metrics or one.messages for one in episodes)
        return cls(
            draw=group.draw,
            task=group.task,
            rollouts=[len(one.rollouts) for one in episodes],
            lengths=[len(one.tokens) for one in rollouts],
            lacking=lacking,
            temperature=[one.temperature for one in rollouts],
            truncated=[one.truncated for one in rollouts],
            sft=[one.sft for one in rollouts],
            teachers=[one.teacher for one in rollouts] if has_teacher else None,
            scores=[one.score for one in episodes],
            correct=[one.correct for one in episodes],
            finish=[one.finish for one in episodes],
            details=[(one.parts, one.metrics, one.messages) for one in episodes] if has_details else None,
            rewards=group.rewards,
            parts=group.parts,
            failed=group.failed,
            group_advantages=group.advantages,
            wire=group.wire,
            kept=[one.kept for one in rollouts] if any(one.kept is not None for one in rollouts) else None,
            experts=[one.experts for one in rollouts] if any(one.experts is not None for one in rollouts) else None,
            turns=[one.turns for one in rollouts] if any(one.turns is not None for one in rollouts) else None,
            turn_order=[one.turn_order for one in rollouts]
            if any(one.turn_order is not None for one in rollouts)
            else None,
            **found,
        )

    def group(self) -> ScoredGroup:
        """Return the group as records whose arrays are views of these."""
        bounds = list(pairwise(accumulate(self.lengths, initial=0)))
        alike, nothing = self.trained is self.sampled, [None] * len(bounds)

        def cut(name: str) -> Sequence[Floats | None]:
            column: Floats | None = getattr(self, name)
            if column is None:
                return nothing
            rows = [column[start:end] for start, end in bounds]
            if (absent := self.lacking.get(name)) is None:
                return rows
            return [None if lacks else row for row, lacks in zip(rows, absent, strict=True)]

        optional = zip(*map(cut, OPTIONAL), strict=True)
        teachers, kept = self.teachers or nothing, self.kept or nothing
        experts, turns, turn_order = self.experts or nothing, self.turns or nothing, self.turn_order or nothing
        rollouts = []
        for number, ((start, end), (logprobs, advantages, reference)) in enumerate(zip(bounds, optional, strict=True)):
            sampled = self.sampled[start:end]
            rollouts.append(
                Rollout(
                    self.tokens[start:end],
                    sampled,
                    sampled if alike else self.trained[start:end],
                    logprobs,
                    self.policy_version[start:end],
                    self.temperature[number],
                    self.truncated[number],
                    advantages,
                    reference,
                    teachers[number],
                    self.sft[number],
                    kept[number],
                    experts[number],
                    turns[number],
                    turn_order[number],
                )
            )
        episodes = []
        for number, (start, end) in enumerate(pairwise(accumulate(self.rollouts, initial=0))):
            parts, metrics, messages = self.details[number] if self.details is not None else ({}, {}, ())
            score, correct, finish = self.scores[number], self.correct[number], self.finish[number]
            episodes.append(Episode(tuple(rollouts[start:end]), score, correct, parts, metrics, messages, finish))
        return ScoredGroup(
            self.draw,
            self.task,
            tuple(episodes),
            self.rewards,
            self.parts,
            self.failed,
            self.group_advantages,
            self.wire,
        )


def by_rollout(values: NDArray[Any], lengths: list[int]) -> NDArray[Any] | None:
    """Return [S] if each rollout has one value at all of its tokens, otherwise None."""
    starts = np.fromiter(accumulate(lengths[:-1], initial=0), np.int64, len(lengths))
    if not lengths or min(lengths) == 0:
        return None
    heads = values[starts]
    return heads if bool((np.repeat(heads, lengths) == values).all()) else None

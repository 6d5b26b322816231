"""Groups with advantages -> one Batch of concatenated tokens. Each trainer cuts it into micro-batches: `grpo` in `packed_rows.py`
(`microbatches`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from atropos_core.errors import DataError
from atropos_core.types import (
    EXPERTS,
    KEPT,
    TURNS,
    Batch,
    Column,
    Floats,
    Ragged,
    Rollout,
    ScoredGroup,
    TopK,
    offsets_of,
)


def to_batch(groups: Sequence[ScoredGroup], version: int) -> Batch:
    """Return the batch. `version` is the policy version that it will produce: `version - 1` samples while it is trained.

    A rollout's own per-token advantages take precedence over its episode's. Raises DataError if there are neither. Optional values
    are columns if any rollout of the batch has them: `ref_logprobs`, `sft`, `teacher_*`, `kept_token_ids`, `experts`, `turn_rewards`; and
    `episode`, if an episode has several rollouts.
    """
    rollouts: list[Rollout] = []
    advantages: list[Floats] = []
    group_of: list[int] = []
    episode_of: list[int] = []
    episodes = 0
    for number, group in enumerate(groups):
        for member, episode in enumerate(group.episodes):
            for rollout in episode.rollouts:
                rollouts.append(rollout)
                advantages.append(_advantages(group, member, rollout))
                group_of.append(number)
                episode_of.append(episodes)
            episodes += 1
    if not rollouts:
        raise DataError("a batch needs at least one rollout")
    return Batch(
        tokens=np.concatenate([rollout.tokens for rollout in rollouts]),
        offsets=offsets_of([len(rollout.tokens) for rollout in rollouts]),
        sampled=np.concatenate([rollout.sampled for rollout in rollouts]),
        trained=np.concatenate([rollout.trained for rollout in rollouts]),
        logprobs=np.concatenate([_or_zeros(rollout.logprobs, rollout) for rollout in rollouts]),
        has_logprobs=np.array([rollout.logprobs is not None for rollout in rollouts]),
        policy_version=np.concatenate([rollout.policy_version for rollout in rollouts]),
        advantages=np.concatenate(advantages),
        temperature=np.array([rollout.temperature for rollout in rollouts], np.float32),
        truncated=np.array([rollout.truncated for rollout in rollouts]),
        group=np.array(group_of, np.int32),
        version=version,
        columns=_columns(rollouts) | _episodes(episode_of),
        ragged=_ragged(rollouts),
    )


def _advantages(group: ScoredGroup, member: int, rollout: Rollout) -> Floats:
    if rollout.advantages is not None:
        return np.where(rollout.trained, rollout.advantages, 0).astype(np.float32)
    if group.advantages is None:
        raise DataError(
            f"the group of task {group.task.id!r} has no advantages.",
            remedy="None of the run's transforms computes advantages. Add one that does: [transform.group_advantage] in the run file, "
            "--set transform.group_advantage.use=group_advantage, or one of your own that returns group.with_advantages(...)",
        )
    return np.where(rollout.trained, group.advantages[member], 0).astype(np.float32)


def _or_zeros(column: Floats | None, rollout: Rollout) -> Floats:
    return np.zeros(len(rollout.tokens), np.float32) if column is None else column


def _episodes(episode_of: Sequence[int]) -> dict[str, Column]:
    numbers = np.array(episode_of, np.int32)
    if (np.diff(numbers) > 0).all():
        return {}
    return {"episode": Column("sequence", numbers, np.ones(len(numbers), np.bool_))}


def _columns(rollouts: Sequence[Rollout]) -> dict[str, Column]:
    made: dict[str, Column] = {}
    if any(rollout.ref_logprobs is not None for rollout in rollouts):
        made["ref_logprobs"] = Column(
            "token",
            np.concatenate([_or_zeros(rollout.ref_logprobs, rollout) for rollout in rollouts]),
            np.concatenate([np.full(len(rollout.tokens), rollout.ref_logprobs is not None) for rollout in rollouts]),
        )
    if any(rollout.sft for rollout in rollouts):
        made["sft"] = Column(
            "sequence", np.array([rollout.sft for rollout in rollouts]), np.ones(len(rollouts), np.bool_)
        )
    if (experts := _experts(rollouts)) is not None:
        made[EXPERTS] = experts
    if any(rollout.turns is not None for rollout in rollouts):
        made[TURNS] = _turns(rollouts)
    return made


def _turns(rollouts: Sequence[Rollout]) -> Column:
    starts = offsets_of([len(rollout.tokens) for rollout in rollouts])
    values, present = np.zeros(starts[-1], np.float64), np.zeros(starts[-1], np.bool_)
    for start, turns in zip(starts[:-1], (rollout.turns for rollout in rollouts), strict=True):
        if turns is not None:
            at = start + turns.ends - 1
            values[at], present[at] = turns.values, True
    return Column("token", values, present)


def _experts(rollouts: Sequence[Rollout]) -> Column | None:
    given = [rollout.experts for rollout in rollouts if rollout.experts is not None]
    if not given:
        return None
    shapes = {one.numbers.shape[1:] for one in given}
    if len(shapes) > 1:
        raise DataError(f"the rollouts of a batch were routed by models of other layers or experts: {sorted(shapes)}")
    known = np.concatenate(
        [np.zeros(len(one.tokens), np.bool_) if one.experts is None else one.experts.known for one in rollouts]
    )
    numbers = np.concatenate([one.numbers for one in given])
    values: NDArray[Any] = np.zeros((len(known), *numbers.shape[1:]), numbers.dtype)
    values[known] = numbers
    return Column("token", values, known)


def _ragged(rollouts: Sequence[Rollout]) -> Mapping[str, Ragged]:
    made = _kept(rollouts)
    if all(rollout.teacher is None for rollout in rollouts):
        return made
    teachers = [rollout.teacher or _silent(len(rollout.tokens)) for rollout in rollouts]
    offsets = offsets_of(np.concatenate([np.diff(teacher.offsets) for teacher in teachers]))
    return made | {
        "teacher_token_ids": Ragged(offsets, np.concatenate([teacher.token_ids for teacher in teachers])),
        "teacher_logprobs": Ragged(offsets, np.concatenate([teacher.logprobs for teacher in teachers])),
    }


def _kept(rollouts: Sequence[Rollout]) -> dict[str, Ragged]:
    if all(rollout.kept is None for rollout in rollouts):
        return {}
    sizes = [
        np.zeros(len(rollout.tokens), np.int32) if rollout.kept is None else rollout.kept.sizes for rollout in rollouts
    ]
    ids = np.concatenate([rollout.kept.token_ids for rollout in rollouts if rollout.kept is not None])
    return {KEPT: Ragged(offsets_of(np.concatenate(sizes)), ids)}


def _silent(length: int) -> TopK:
    return TopK(np.zeros(length + 1, np.int64), np.zeros(0, np.int32), np.zeros(0, np.float32))

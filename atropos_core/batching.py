"""Groups with advantages -> one packed Batch."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from atropos_core.errors import DataError
from atropos_core.types import Batch, Floats, Rollout, ScoredGroup


def pack(groups: Sequence[ScoredGroup], version: int) -> Batch:
    """`version` is the policy version that this batch will produce: `version - 1` samples while it is trained.

    A rollout's own per-token advantages go before its episode's. Raises DataError where neither is there.
    """
    rollouts: list[Rollout] = []
    advantages: list[Floats] = []
    group_of: list[int] = []
    for number, group in enumerate(groups):
        for member, episode in enumerate(group.episodes):
            for rollout in episode.rollouts:
                rollouts.append(rollout)
                advantages.append(_advantages(group, member, rollout))
                group_of.append(number)
    if not rollouts:
        raise DataError("a batch needs at least one rollout")
    lengths = [len(rollout.tokens) for rollout in rollouts]
    return Batch(
        tokens=np.concatenate([rollout.tokens for rollout in rollouts]),
        offsets=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
        sampled=np.concatenate([rollout.sampled for rollout in rollouts]),
        trained=np.concatenate([rollout.trained for rollout in rollouts]),
        logprobs=np.concatenate(
            [np.zeros(len(r.tokens), np.float32) if r.logprobs is None else r.logprobs for r in rollouts]
        ),
        has_logprobs=np.array([rollout.logprobs is not None for rollout in rollouts]),
        policy_version=np.concatenate([rollout.policy_version for rollout in rollouts]),
        advantages=np.concatenate(advantages),
        temperature=np.array([rollout.temperature for rollout in rollouts], np.float32),
        truncated=np.array([rollout.truncated for rollout in rollouts]),
        group=np.array(group_of, np.int32),
        version=version,
    )


def _advantages(group: ScoredGroup, member: int, rollout: Rollout) -> Floats:
    if rollout.advantages is not None:
        return np.where(rollout.trained, rollout.advantages, 0).astype(np.float32)
    if group.advantages is None:
        raise DataError(
            f"the group of task {group.task.id!r} has no advantages.",
            remedy="Name a transform that computes them: [transform.group_advantage]",
        )
    return np.where(rollout.trained, group.advantages[member], 0).astype(np.float32)

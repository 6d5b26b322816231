"""Transforms: compute group advantages, and drop flat groups."""

from __future__ import annotations

from collections.abc import Sequence

from atropos_core.advantages import group_advantages, is_flat
from atropos_core.builtin.config import GroupAdvantageOptions
from atropos_core.interfaces import Transform
from atropos_core.types import Episode, ScoredGroup


class GroupAdvantage(Transform):
    """Computes advantages from each episode's reward relative to the other episodes of its task. A group that has advantages keeps
    them: an earlier transform, or the worker that sent it, computed them."""

    def __init__(self, options: GroupAdvantageOptions) -> None:
        self._baseline = options.baseline
        self._divide = options.divide_by_std is not False

    async def __call__(self, groups: Sequence[ScoredGroup]) -> Sequence[ScoredGroup]:
        return [
            group
            if group.advantages is not None
            else group.with_advantages(group_advantages(group.rewards, self._baseline, divide_by_std=self._divide))
            for group in groups
        ]


class DropFlat(Transform):
    """Drops groups that cost a training pass and teach the policy nothing: every advantage is 0, or, if none have been computed yet,
    all rewards are equal. Groups with something else to learn from are kept: own advantages, a teacher's tokens, supervised
    data."""

    async def __call__(self, groups: Sequence[ScoredGroup]) -> Sequence[ScoredGroup]:
        return [group for group in groups if not _is_idle(group) or any(map(_teaches, group.episodes))]


def _is_idle(group: ScoredGroup) -> bool:
    return is_flat(group.rewards) if group.advantages is None else not group.advantages.any()


def _teaches(episode: Episode) -> bool:
    """True if the policy learns from the episode whatever its reward."""
    return any(
        rollout.sft
        or rollout.teacher is not None
        or (rollout.advantages is not None and bool(rollout.advantages[rollout.trained].any()))
        for rollout in episode.rollouts
    )

"""Versions of a policy count from a checkpoint on; what a run that died after it had trained beyond is another timeline."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from atropos_core.types import UNKNOWN_VERSION, Rollout, ScoredGroup


def sampled_after(group: ScoredGroup, newest: int) -> bool:
    """Whether a token of it was sampled from a version later than `newest`."""
    return any((rollout.policy_version[rollout.sampled] > newest).any() for rollout in _rollouts(group))


def without_versions_after(group: ScoredGroup, newest: int) -> ScoredGroup:
    """Tokens of a later version are of one that nobody knows."""
    if not any((rollout.policy_version > newest).any() for rollout in _rollouts(group)):
        return group

    def known(rollout: Rollout) -> Rollout:
        versions = rollout.policy_version
        return replace(rollout, policy_version=np.where(versions > newest, np.int32(UNKNOWN_VERSION), versions))

    episodes = (replace(episode, rollouts=tuple(map(known, episode.rollouts))) for episode in group.episodes)
    return replace(group, episodes=tuple(episodes))


def _rollouts(group: ScoredGroup) -> Iterator[Rollout]:
    return (rollout for episode in group.episodes for rollout in episode.rollouts)

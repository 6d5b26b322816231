"""Groups of another timeline: tokens with versions of a run that died, later than the checkpoint that the run resumed from."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from atropos_core.types import UNKNOWN_VERSION, Rollout, ScoredGroup


def sampled_after(group: ScoredGroup, newest: int) -> bool:
    """True if any of its tokens was sampled from a version later than `newest`."""
    return any((rollout.policy_version[rollout.sampled] > newest).any() for rollout in _rollouts(group))


def without_versions_after(group: ScoredGroup, newest: int) -> ScoredGroup:
    """Set the version of tokens after `newest` to unknown."""
    if not any((rollout.policy_version > newest).any() for rollout in _rollouts(group)):
        return group

    def known(rollout: Rollout) -> Rollout:
        versions = rollout.policy_version
        return replace(rollout, policy_version=np.where(versions > newest, np.int32(UNKNOWN_VERSION), versions))

    episodes = (replace(episode, rollouts=tuple(map(known, episode.rollouts))) for episode in group.episodes)
    return replace(group, episodes=tuple(episodes))


def _rollouts(group: ScoredGroup) -> Iterator[Rollout]:
    return (rollout for episode in group.episodes for rollout in episode.rollouts)

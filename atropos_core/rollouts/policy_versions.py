"""Refuse policy versions that cannot exist: after a resume they count on from the checkpoint, and later ones of the run that died
never existed."""

from __future__ import annotations

import numpy as np

from atropos_core.errors import NoSuchVersion
from atropos_core.group_schema import ID_BOUND
from atropos_core.types import UNKNOWN_VERSION, ScoredGroup


def check_versions(group: ScoredGroup, newest: int | None) -> None:
    """Raises NoSuchVersion if a sampled token claims a version above `newest`, the highest that engines can have sampled from, or
    below UNKNOWN_VERSION. `newest` is None if it is unknown."""
    highest = ID_BOUND - 1 if newest is None else newest
    for rollout in (rollout for episode in group.episodes for rollout in episode.rollouts):
        versions = rollout.policy_version
        # One pass if all versions are known: as unsigned numbers, negative ones are above them all.
        if not len(versions) or int(np.maximum.reduce(versions.view(np.uint32))) <= highest:
            continue
        sampled = versions[rollout.sampled]
        wrong = sampled[(sampled > highest) | (sampled < UNKNOWN_VERSION)]
        if len(wrong):
            known = (
                "no version is below 0"
                if newest is None or wrong[0] < 0
                else f"the newest that there can be is {newest}"
            )
            raise NoSuchVersion(
                f"group of task {group.task.id!a:.100} of environment {group.draw.environment!a:.100}: {len(wrong)} of its tokens "
                f"claim to be sampled from policy version {wrong[0]}, and {known}.",
                remedy=f"Send each token's version as the engine gave it, or {UNKNOWN_VERSION} if it is unknown.",
            )

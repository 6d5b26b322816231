"""The success rate (solve rate) of a settled group's task."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from atropos_core.types import ScoredGroup
from atropos_curriculum.config import CurriculumOptions


@dataclass(frozen=True)
class Evidence:
    success: float  # mean over the rollouts, from 0 to 1
    rollouts: int
    clipped: bool  # a reward was outside `reward_range`


def evidence_of(group: ScoredGroup, options: CurriculumOptions) -> Evidence | None:
    """None if there is no evidence: no rollout ended, or `success = "correct"` and the environment does not say it."""
    if not group.episodes:
        return None
    correct = [episode.correct for episode in group.episodes if episode.correct is not None]
    if options.success == "correct" or (options.success == "auto" and len(correct) == len(group.episodes)):
        return Evidence(sum(correct) / len(correct), len(correct), False) if correct else None
    low, high = options.reward_range
    scaled = (group.rewards.astype(np.float64) - low) / (high - low)
    inside = np.clip(scaled, 0.0, 1.0)
    return Evidence(float(inside.mean()), len(scaled), bool((inside != scaled).any()))

"""Reward transforms that depend on the lengths of a group's replies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from atropos_core.advantages import is_flat
from atropos_core.errors import ConfigError, DataError
from atropos_core.interfaces import Transform
from atropos_core.types import Bools, Floats, Metrics, ScoredGroup
from atropos_normalization.config import EqualGroupOptions, LengthPenaltyOptions
from atropos_normalization.zscore import RAW

Lengths = NDArray[np.int64]


def lengths(group: ScoredGroup) -> Lengths:
    """Sampled tokens of each episode. [G]"""
    return np.array(
        [sum(int(rollout.sampled.sum()) for rollout in episode.rollouts) for episode in group.episodes], np.int64
    )


def correctness(group: ScoredGroup, above: float | None, transform: str) -> Bools:
    """Flags of the correct episodes [G], by their reward or as the environment says. Raises DataError if it does not say."""
    if above is not None:
        return np.asarray(group.rewards > above)
    verdicts = [episode.correct for episode in group.episodes]
    if None in verdicts:
        raise DataError(
            f"the transform {transform!r} needs to know which replies are correct, and environment {group.draw.environment!r} does "
            "not say.",
            remedy="Set correct_above: a reward above it counts as correct.",
        )
    return np.array(verdicts, bool)


def against_the_group(long: Lengths, correct: Bools) -> NDArray[np.float64]:
    """The length reward of Kimi k1.5 (arXiv 2501.12599, section 2.3.3) for G replies, [G]: from 0.5 for the shortest to
    -0.5 for the longest, and at most 0 for a wrong one. All 0 if the lengths are equal."""
    if not len(long) or long.max() == long.min():
        return np.zeros(len(long))
    share = 0.5 - (long - long.min()) / (long.max() - long.min())
    return np.asarray(np.where(correct, share, np.minimum(share, 0.0)), np.float64)


def beyond(long: Lengths, free: int, limit: int) -> NDArray[np.float64]:
    """0 up to `free` tokens, 1 from `limit` on, linear between. [G]"""
    return np.asarray(np.clip((long - free) / (limit - free), 0.0, 1.0), np.float64)


class LengthPenalty(Transform):
    """Add to each reward what the length of its reply earns or costs."""

    def __init__(self, options: LengthPenaltyOptions) -> None:
        self._options = options
        self._added: list[NDArray[np.float64]] = []  # to the rewards of the step

    async def __call__(self, groups: Sequence[ScoredGroup]) -> Sequence[ScoredGroup]:
        return [self._penalised(group) for group in groups]

    def metrics(self) -> Metrics:
        """`mean` and `lowest` of what was added to the step's rewards."""
        added = np.concatenate(self._added) if self._added else np.zeros(0)
        self._added = []
        return {"mean": float(added.mean()) if len(added) else 0.0, "lowest": float(added.min(initial=0.0))}

    def _penalised(self, group: ScoredGroup) -> ScoredGroup:
        long, options = lengths(group), self._options
        if options.cost is not None:
            added = -options.cost * np.maximum(long - options.free_tokens, 0)
        else:
            correct = correctness(group, options.correct_above, "length_penalty")
            added = options.weight * against_the_group(long, correct)
        self._added.append(added)
        return _with_rewards(group, group.rewards.astype(np.float64) + added, "length_penalty")


class EqualGroup(Transform):
    """If all replies of a group are correct and their rewards equal, their lengths decide, as in atroposlib's gsm8k. Groups that
    are still equal, or equal and wrong, are left for `drop_flat`."""

    def __init__(self, options: EqualGroupOptions) -> None:
        self._options = options
        self._seen = self._equal = self._distinguished = 0  # groups of the step

    async def __call__(self, groups: Sequence[ScoredGroup]) -> Sequence[ScoredGroup]:
        return [self._settled(group) for group in groups]

    def metrics(self) -> Metrics:
        """`equal`: share of the step's groups whose replies are all right; `told_apart`: share that length distinguished."""
        seen = max(self._seen, 1)
        metrics = {"equal": self._equal / seen, "told_apart": self._distinguished / seen}
        self._seen = self._equal = self._distinguished = 0
        return metrics

    def _settled(self, group: ScoredGroup) -> ScoredGroup:
        options = self._options
        self._seen += 1
        if not is_flat(group.rewards) or not correctness(group, options.correct_above, "equal_group").all():
            return group
        self._equal += 1
        lost = options.weight * beyond(lengths(group), options.free_tokens, options.limit_tokens)
        made = _with_rewards(group, group.rewards.astype(np.float64) - lost, "equal_group")
        self._distinguished += not is_flat(made.rewards)
        return made


def _with_rewards(group: ScoredGroup, rewards: NDArray[np.float64], transform: str) -> ScoredGroup:
    if group.advantages is not None:
        raise ConfigError(
            f"the transform {transform!r} got groups that already have advantages, so that changing their rewards "
            "would have no effect.",
            remedy="Name it before group_advantage in the run file: transforms run in that order.",
        )
    values: Floats = np.asarray(rewards, np.float32)
    return replace(group, rewards=values, parts={RAW: group.rewards, **group.parts})

"""Compute the numbers that checks need from the groups of a step. Arrays are joined once, with no Python loop per token."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np

from atropos_core.health.gold_reward import CANARY, CANARY_ROLLOUTS
from atropos_core.health.replies import measure_replies
from atropos_core.types import Metrics, ScoredGroup

MOST_ROLLOUTS = 32  # of the step, whose tokens say how sure the policy is


def measure(raw: Sequence[ScoredGroup], trained: Sequence[ScoredGroup], failed: Sequence[ScoredGroup]) -> Metrics:
    """Measure a step. `raw` groups are as leased, `trained` ones have advantages, `failed` ones have too few episodes. Numbers without
    data are left out."""
    metrics: Metrics = {}
    rewards = [group.rewards for group in raw if len(group.rewards)]
    if rewards:
        metrics["reward/max_abs"] = float(np.abs(np.concatenate(rewards)).max())
    advantages = [group.advantages for group in trained if group.advantages is not None and len(group.advantages)]
    if advantages:
        metrics["advantage/max_abs"] = float(np.abs(np.concatenate(advantages)).max())
    every = [*raw, *failed]
    where = [one.where for group in every for one in group.failed]
    metrics["rollouts/failed_reward"] = float(where.count("reward"))
    metrics["rollouts/failed_play"] = float(len(where) - where.count("reward"))
    if every:
        metrics["groups/partial"] = sum(bool(group.failed and group.episodes) for group in every) / len(every)
    metrics |= measure_replies(raw)
    metrics |= _canary_rollouts(raw)
    entropy = _sampled_entropy(raw)
    return metrics if entropy is None else metrics | {"entropy/sampled": entropy}


def causes(groups: Sequence[ScoredGroup]) -> Mapping[str, str]:
    """Return the first failure of the step for each check that reports failures."""
    found: dict[str, str] = {}
    for group in groups:
        for one in group.failed:
            found.setdefault("failed_rewards" if one.where == "reward" else "failed_plays", one.cause)
            if group.episodes:
                found.setdefault("partial_groups", one.cause)
    return found


def _canary_rollouts(groups: Sequence[ScoredGroup]) -> Metrics:
    """Return how many rollouts reported each metric canary/NAME, whose mean is a metric of the step."""
    reported = Counter(
        name for group in groups for one in group.episodes for name in one.metrics if name.startswith(CANARY)
    )
    return {CANARY_ROLLOUTS + name.removeprefix(CANARY): float(count) for name, count in sorted(reported.items())}


def _sampled_entropy(groups: Sequence[ScoredGroup]) -> float | None:
    """Return the mean of -log p over sampled tokens, in nats: an unbiased estimate of the entropy of the sampled distribution,
    without the trainer. Greedy tokens are skipped, since they have no distribution."""
    rollouts = [
        rollout
        for group in groups
        for one in group.episodes
        for rollout in one.rollouts
        if rollout.logprobs is not None and rollout.temperature > 0
    ]
    rollouts = rollouts[:: -(-len(rollouts) // MOST_ROLLOUTS)] if rollouts else []
    if not rollouts:
        return None
    sampled = np.concatenate([rollout.sampled for rollout in rollouts])
    logprobs = np.concatenate([rollout.logprobs for rollout in rollouts if rollout.logprobs is not None])
    return -float(logprobs[sampled].mean(dtype=np.float64)) if sampled.any() else None

"""Metrics of a step, computed from its groups."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from atropos_core.interfaces import Engine, Trainer
from atropos_core.rollouts.evaluation import cut_off_lowest
from atropos_core.types import UNKNOWN_VERSION, Floats, Metrics, Rollout, ScoredGroup

RESCORED_GROUPS = 32
PROVEN_GROUPS = 2


async def rescoring_difference(groups: Sequence[ScoredGroup], trainer: Trainer) -> float | None:
    """Return the largest |trainer - engine| logprob over sampled tokens of the first groups, in nats; nothing may have been trained
    since they were sampled. Truncated rollouts are skipped: their logprobs are of another distribution. None if there are no
    others."""
    by_temperature: dict[float, list[Rollout]] = defaultdict(list)
    for rollout in _rollouts(groups):
        if rollout.logprobs is not None and not rollout.truncated:
            by_temperature[rollout.temperature or 1.0].append(rollout)
    differences: list[Floats] = []
    for temperature, rollouts in by_temperature.items():
        scores = await trainer.logprobs([rollout.tokens for rollout in rollouts], temperature)
        for score, rollout in zip(scores, rollouts, strict=True):
            if rollout.logprobs is not None:
                differences.append(np.abs(score - rollout.logprobs)[rollout.sampled])
    return float(np.concatenate(differences).max(initial=0.0)) if differences else None


async def rounding_of(groups: Sequence[ScoredGroup], trainer: Trainer) -> float | None:
    """Return by how many nats rounding can move a logprob of these groups, with the trainer's present weights. None if the trainer
    cannot measure it."""
    by_temperature: dict[float, list[Rollout]] = defaultdict(list)
    for rollout in _rollouts(groups):
        by_temperature[rollout.temperature or 1.0].append(rollout)
    measured = [
        await trainer.rounding([one.tokens for one in rollouts], temperature)
        for temperature, rollouts in by_temperature.items()
    ]
    return max((one for one in measured if one is not None), default=None)


async def rescoring_gap(groups: Sequence[ScoredGroup], engine: Engine, trainer: Trainer) -> float | None:
    """Return the largest difference between engine and trainer when both score the same tokens now, in nats. This proves that they
    hold the same weights if a batch has no token that was sampled with them. None if the engine cannot score."""
    sequences = [rollout.tokens for rollout in _rollouts(groups[:PROVEN_GROUPS])]
    if not sequences:
        return None
    try:
        theirs = await engine.logprobs(sequences)
    except NotImplementedError:
        return None
    ours = await trainer.logprobs(sequences)
    differences = [np.abs(a - b).max(initial=0.0) for a, b in zip(ours, theirs, strict=True)]
    return float(np.max(differences))


def _rollouts(groups: Sequence[ScoredGroup]) -> list[Rollout]:
    return [rollout for group in groups[:RESCORED_GROUPS] for one in group.episodes for rollout in one.rollouts]


def versions(groups: Sequence[ScoredGroup]) -> set[int]:
    """Return the known policy versions of sampled tokens."""
    rollouts = [rollout for group in groups for one in group.episodes for rollout in one.rollouts]
    return {int(version) for one in rollouts for version in np.unique(one.policy_version[one.sampled])} - {
        UNKNOWN_VERSION
    }


def staleness(groups: Sequence[ScoredGroup], version: int) -> Metrics:
    """Return how many versions the trained tokens of these groups are behind `version`, for known versions."""
    behind = [
        version - rollout.policy_version[rollout.sampled & rollout.trained]
        for group in groups
        for one in group.episodes
        for rollout in one.rollouts
    ]
    known = np.concatenate([np.zeros(0, np.int32), *behind])
    known = known[known != version - UNKNOWN_VERSION]
    return {"staleness/max": float(known.max()), "staleness/mean": float(known.mean())} if len(known) else {}


def group_metrics(groups: Sequence[ScoredGroup], failed: Sequence[ScoredGroup] = ()) -> Metrics:
    """Return metrics of groups. `groups` have at least one episode each; `failed` have too few. An environment's metric whose name has
    a section, as in "agent/calls", is also a metric of the step: the mean over the episodes that have it."""
    rewards = np.concatenate([group.rewards for group in groups])
    episodes = [episode for group in groups for episode in group.episodes]
    correct = [episode.correct for episode in episodes if episode.correct is not None]
    sampled = sum(int(rollout.sampled.sum()) for episode in episodes for rollout in episode.rollouts)
    metrics: Metrics = {
        "reward/mean": float(rewards.mean()),
        "reward/std": float(rewards.std()),
        "rollouts/count": float(len(episodes)),
        "rollouts/failed": float(sum(len(group.failed) for group in [*groups, *failed])),
        "rollouts/cut_off": float(np.mean([episode.finish == "length" for episode in episodes])),
        "rollouts/cut_off_lowest": cut_off_lowest(groups),
        "tokens/sampled": float(sampled),
        "tokens/mean": sampled / len(episodes),
    }
    if correct:
        metrics["accuracy"] = float(np.mean(correct))
    for name in sorted({name for group in groups for name in group.parts}):
        metrics[f"reward/{name}"] = float(np.concatenate([g.parts[name] for g in groups if name in g.parts]).mean())
    for name in sorted({name for episode in episodes for name in episode.metrics if "/" in name}):
        metrics[name] = float(np.mean([episode.metrics[name] for episode in episodes if name in episode.metrics]))
    return metrics

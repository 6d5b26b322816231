"""Numbers of a step, computed from its groups."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from atropos_core.interfaces import Trainer
from atropos_core.types import Metrics, ScoredGroup

RESCORED_GROUPS = 32


async def rescoring_difference(groups: Sequence[ScoredGroup], trainer: Trainer) -> float:
    """The largest |trainer - engine| logprob over sampled tokens of the first groups, in nats; nothing may have been
    trained since they were sampled."""
    rollouts = [rollout for group in groups[:RESCORED_GROUPS] for one in group.episodes for rollout in one.rollouts]
    rollouts = [rollout for rollout in rollouts if rollout.logprobs is not None]
    if not rollouts:
        return 0.0
    scores = await trainer.logprobs([rollout.tokens for rollout in rollouts], rollouts[0].temperature or 1.0)
    differences = [
        np.abs(score - rollout.logprobs)[rollout.sampled]
        for score, rollout in zip(scores, rollouts, strict=True)
        if rollout.logprobs is not None
    ]
    return float(np.concatenate(differences).max(initial=0.0))


def group_metrics(groups: Sequence[ScoredGroup], failed: Sequence[ScoredGroup] = ()) -> Metrics:
    """`groups` have at least one episode each; `failed` are those that have not enough."""
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
        "tokens/sampled": float(sampled),
        "tokens/mean": sampled / len(episodes),
    }
    if correct:
        metrics["accuracy"] = float(np.mean(correct))
    for name in sorted({name for group in groups for name in group.parts}):
        metrics[f"reward/{name}"] = float(np.concatenate([g.parts[name] for g in groups if name in g.parts]).mean())
    return metrics

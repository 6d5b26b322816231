"""Numbers of a step, computed from its groups."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from atropos_core.interfaces import Engine, Trainer
from atropos_core.types import Metrics, Rollout, ScoredGroup

RESCORED_GROUPS = 32
PROVEN_GROUPS = 2


async def rescoring_difference(groups: Sequence[ScoredGroup], trainer: Trainer) -> float:
    """The largest |trainer - engine| logprob over sampled tokens of the first groups, in nats; nothing may have been
    trained since they were sampled. Truncated rollouts are left out: their logprobs are of another distribution."""
    by_temperature: dict[float, list[Rollout]] = defaultdict(list)
    for rollout in _rollouts(groups):
        if rollout.logprobs is not None and not rollout.truncated:
            by_temperature[rollout.temperature or 1.0].append(rollout)
    largest = 0.0
    for temperature, rollouts in by_temperature.items():
        scores = await trainer.logprobs([rollout.tokens for rollout in rollouts], temperature)
        for score, rollout in zip(scores, rollouts, strict=True):
            if rollout.logprobs is not None:
                largest = max(largest, float(np.abs(score - rollout.logprobs)[rollout.sampled].max(initial=0.0)))
    return largest


async def rescoring_gap(groups: Sequence[ScoredGroup], engine: Engine, trainer: Trainer) -> float | None:
    """The largest difference between engine and trainer when both score the same tokens now, in nats: proof that they
    hold the same weights where no token of a batch was sampled under them. None where the engine cannot score."""
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

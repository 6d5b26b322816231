"""Metrics of a step: of its groups, how fast it was (tokens/s), and how long its stages took."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from atropos_core.observe.profile import Profile
from atropos_core.rollouts.evaluation import cut_off_lowest
from atropos_core.rollouts.source import LeasedGroup
from atropos_core.types import UNKNOWN_VERSION, Metrics, ScoredGroup


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


def step_speed(began: float, gathered: float, trained: float, metrics: Metrics) -> Metrics:
    """Return tokens/s, trajectories/s and the times of a step, without its evaluation and recording. The first three arguments are
    times of one clock."""
    seconds = trained - began
    return {
        "time/step_s": seconds,
        "time/rollouts_s": gathered - began,
        "time/training_s": trained - gathered,
        "tokens/s": metrics["tokens/sampled"] / seconds,
        "trajectories/s": metrics["rollouts/count"] / seconds,
    }


def stage_times(profile: Profile, leased: Sequence[LeasedGroup]) -> Metrics:
    """Return times of stages and calls since the last step's, which therefore include its sinks and checkpoint."""
    times = profile.step()
    times["time/disk_s"] = times.get("time/checkpoint_s", 0.0) + sum(
        spent for name, spent in times.items() if name.startswith("time/sink/")
    )
    waited = [one.waited_s for one in leased if one.waited_s is not None]
    if waited:
        times |= {"time/queue_mean_s": sum(waited) / len(waited), "time/queue_max_s": max(waited)}
    return times

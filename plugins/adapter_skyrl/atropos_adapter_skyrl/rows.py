"""From our groups to SkyRL's rows: a prompt, a response, and what is known of each token of the response.

SkyRL wants Python lists; until then a row is numpy. A row is a whole trajectory, or, step by step, one reply of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from atropos_core.errors import DataError
from atropos_core.types import Bools, Episode, Floats, Rollout, ScoredGroup, Tokens, Versions


@dataclass(frozen=True, slots=True)
class Row:
    """One row of SkyRL's batch. `advantages`: those of the environment or of a transform, where there are any."""

    prompt: Tokens  # [P]
    response: Tokens  # [R]
    trained: Bools  # [R]
    logprobs: Floats | None  # [R] 0 where nothing was sampled
    versions: Versions  # [R]
    reward: float
    finish: str
    last: bool = True  # of its trajectory
    advantages: Floats | None = None  # [R]
    metrics: Mapping[str, float] = field(default_factory=dict)

    @property
    def size_bytes(self) -> int:
        columns = (self.prompt, self.response, self.trained, self.logprobs, self.versions, self.advantages)
        return sum(column.nbytes for column in columns if column is not None)


def rows_of(group: ScoredGroup, *, step_wise: bool) -> list[list[Row]]:
    """For each episode its rows. Raises DataError for what SkyRL has no place for."""
    return [
        _of_episode(
            group, episode, float(reward), None if group.advantages is None else group.advantages[at], step_wise
        )
        for at, (episode, reward) in enumerate(zip(group.episodes, group.rewards, strict=True))
    ]


def _of_episode(
    group: ScoredGroup, episode: Episode, reward: float, advantage: float | None, step_wise: bool
) -> list[Row]:
    if len(episode.rollouts) > 1 and not step_wise:
        raise DataError(
            f"task {group.task.id!r}: an episode has {len(episode.rollouts)} token histories, and SkyRL takes one a row.",
            remedy="generator.step_wise_trajectories=true",
        )
    spans = [(rollout, *span) for rollout in episode.rollouts for span in _spans(rollout, step_wise, group.task.id)]
    rows = []
    for at, (rollout, begin, end) in enumerate(spans):
        last = at == len(spans) - 1
        advantages = None if rollout.advantages is None else rollout.advantages[begin:end]
        if advantages is None and advantage is not None:
            advantages = np.where(rollout.trained[begin:end], np.float32(advantage), np.float32(0))
        rows.append(
            Row(
                prompt=rollout.tokens[:begin],
                response=rollout.tokens[begin:end],
                trained=rollout.trained[begin:end],
                logprobs=None if rollout.logprobs is None else rollout.logprobs[begin:end],
                versions=rollout.policy_version[begin:end],
                reward=reward if last else 0.0,
                finish=episode.finish if last else "stop",
                last=last,
                advantages=advantages,
                metrics=episode.metrics if last else {},
            )
        )
    return rows


def _spans(rollout: Rollout, step_wise: bool, task: str) -> list[tuple[int, int]]:
    """Where responses begin and end: from the first sampled token to the last token, or each run of sampled tokens."""
    edges = np.flatnonzero(np.diff(rollout.sampled.astype(np.int8), prepend=0, append=0)).tolist()
    if rollout.sft or not edges or edges[0] == 0:
        raise DataError(f"task {task!r}: SkyRL wants a prompt and a sampled reply; here is a rollout without.")
    if rollout.trained[: edges[0]].any():
        raise DataError(f"task {task!r}: tokens ahead of the first reply are to be trained, which SkyRL cannot do.")
    if step_wise:
        return list(zip(edges[::2], edges[1::2], strict=True))
    return [(edges[0], len(rollout.tokens))]


def output_of(
    trajectories: Sequence[Sequence[Row]],
    ids: Sequence[Any],
    seconds: Sequence[float],
    *,
    step_wise: bool,
    own_advantages: bool,
) -> dict[str, Any]:
    """SkyRL's GeneratorOutput of these trajectories, in this order, with every key that any version of it looks for.
    With `own_advantages`, `rewards` are the rows' advantages, token by token, for the estimator "atropos". Also
    `policy_versions`, beside each response, which SkyRL does not look at."""
    rows = [row for rows in trajectories for row in rows]
    of = [at for at, rows in enumerate(trajectories) for _ in rows]
    return {
        "prompt_token_ids": [row.prompt.tolist() for row in rows],
        "response_ids": [row.response.tolist() for row in rows],
        "rewards": [_advantages(row) for row in rows] if own_advantages else [row.reward for row in rows],
        "loss_masks": [row.trained.astype(np.int8).tolist() for row in rows],
        "stop_reasons": [row.finish for row in rows],
        "rollout_metrics": _metrics(rows),
        "rollout_logprobs": _logprobs(rows),
        "trajectory_ids": [ids[at] for at in of],
        "trajectory_generation_times": [seconds[at] for at in of],
        "rollout_expert_indices": None,
        "is_last_step": [row.last for row in rows] if step_wise else None,
        "env_metrics": [dict(row.metrics) for row in rows],
        "pixel_values": None,
        "image_grid_thw": None,
        "policy_versions": [row.versions.tolist() for row in rows],
    }


def _logprobs(rows: Sequence[Row]) -> list[list[float]] | None:
    known = sum(row.logprobs is not None for row in rows)
    if known == 0:
        return None
    if known < len(rows):
        raise DataError(
            f"{known} of {len(rows)} rows came with logprobs, and SkyRL wants those of all rows, or of none.",
            remedy="Have every worker send logprobs.",
        )
    return [row.logprobs.tolist() for row in rows if row.logprobs is not None]


def _advantages(row: Row) -> list[float]:
    if row.advantages is None:
        raise DataError(
            'trainer.algorithm.advantage_estimator is "atropos", and the environment gave no advantages.',
            remedy="Use grpo, or have the environment give Rollout.advantages.",
        )
    values: list[float] = row.advantages.tolist()
    return values


def _metrics(rows: Iterable[Row]) -> dict[str, float]:
    """Over the whole batch: the mean of each of the environment's metrics, the reward, and the spread of versions."""
    named: dict[str, list[float]] = {}
    sampled: list[Versions] = []
    for row in rows:
        sampled.append(row.versions[row.trained])
        if row.last:
            named.setdefault("atropos/mean_reward", []).append(row.reward)
            for name, value in row.metrics.items():
                named.setdefault(f"environment/mean_{name}", []).append(value)
    told = {name: float(np.mean(values)) for name, values in named.items()}
    versions = np.concatenate([np.zeros(0, np.int32), *sampled])
    if len(versions):
        told |= {
            "atropos/min_policy_version": float(versions.min()),
            "atropos/max_policy_version": float(versions.max()),
        }
    return told

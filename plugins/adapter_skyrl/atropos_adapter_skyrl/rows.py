"""Convert our groups to SkyRL's rows: a prompt, a response, and the data of each token of the response.

SkyRL needs Python lists; until then a row is numpy. A row is a whole trajectory, or in step-wise training one reply of it.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from operator import attrgetter, methodcaller
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from atropos_adapter_skyrl.number_list import NumberList
from atropos_core.errors import DataError
from atropos_core.turn_rewards import outcome_reward
from atropos_core.types import Bools, Episode, Floats, Rollout, ScoredGroup, Tokens, TurnRewards, Versions

_NONE: Mapping[str, float] = MappingProxyType({})


class TrainingRow(NamedTuple):
    """One row of SkyRL's batch. `advantages`: those of the environment or of a transform, if any."""

    prompt: Tokens  # [P]
    response: Tokens  # [R]
    trained: Bools  # [R]
    logprobs: Floats | None  # [R] 0 for tokens that were not sampled
    versions: Versions  # [R]
    reward: float
    finish: str
    last: bool = True  # of its trajectory
    advantages: Floats | None = None  # [R]
    metrics: Mapping[str, float] = _NONE
    turns: TurnRewards | None = None  # parts of `reward`, by their tokens in the response; not in step-wise rows


def rows_of(group: ScoredGroup, *, step_wise: bool) -> list[list[TrainingRow]]:
    """Return the rows of each episode. Raises DataError for data that SkyRL has no place for."""
    return [
        _of_episode(
            group, episode, float(reward), None if group.advantages is None else group.advantages[at], step_wise
        )
        for at, (episode, reward) in enumerate(zip(group.episodes, group.rewards, strict=True))
    ]


def _of_episode(
    group: ScoredGroup, episode: Episode, reward: float, advantage: float | None, step_wise: bool
) -> list[TrainingRow]:
    if len(episode.rollouts) > 1 and not step_wise:
        raise DataError(
            f"task {group.task.id!r}: an episode has {len(episode.rollouts)} token histories, but SkyRL takes one a row.",
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
            TrainingRow(
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
                turns=None if step_wise or rollout.turns is None else _in_response(rollout.turns, begin),
            )
        )
    return rows


def _in_response(turns: TurnRewards, begin: int) -> TurnRewards:
    return TurnRewards(turns.ends - begin, turns.values)


def _spans(rollout: Rollout, step_wise: bool, task: str) -> list[tuple[int, int]]:
    """The spans of responses: from the first sampled token to the last token, or each run of sampled tokens."""
    sampled = rollout.sampled
    begin = sampled.tobytes().find(1)  # faster than numpy's calls: this runs for every rollout
    if rollout.sft or begin <= 0:
        raise DataError(f"task {task!r}: SkyRL needs a prompt and a sampled reply, and a rollout lacks one.")
    if 0 <= rollout.trained.tobytes().find(1) < begin:
        raise DataError(f"task {task!r}: tokens before the first reply are to be trained, which SkyRL cannot do.")
    if step_wise:
        edges = [*(np.flatnonzero(sampled[1:] != sampled[:-1]) + 1).tolist(), *([len(sampled)] if sampled[-1] else [])]
        return list(zip(edges[::2], edges[1::2], strict=True))
    return [(begin, len(rollout.tokens))]


def output_of(
    trajectories: Sequence[Sequence[TrainingRow]],
    ids: Sequence[Any],
    seconds: Sequence[float],
    *,
    step_wise: bool,
    own_advantages: bool,
    turn_rewards: bool = False,
    arrays: bool = False,
) -> dict[str, Any]:
    """SkyRL's GeneratorOutput of these trajectories, in this order, with every key that the tested versions read. With
    `own_advantages`, `rewards` are the rows' advantages, token by token, for the estimator "atropos". With `turn_rewards`, they are the
    turn rewards at their tokens, and the outcome reward on the last token. It also has
    `policy_versions`, an array for each response, which SkyRL ignores. With `arrays` nothing is copied: ids and masks are NumberLists
    and logprobs float32 arrays [R] instead of lists, and SkyRL makes the same tensors of them."""
    with _collector_paused():
        return _output(trajectories, ids, seconds, step_wise, own_advantages, turn_rewards, arrays)


@contextmanager
def _collector_paused() -> Iterator[None]:
    """Pause Python's collector. Each new list may start it; it would go through all earlier lists and find nothing, which is half of the
    time that these lists take."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _output(
    trajectories: Sequence[Sequence[TrainingRow]], ids: Sequence[Any], seconds: Sequence[float], step_wise: bool,
    own_advantages: bool, turn_rewards: bool, arrays: bool,
) -> dict[str, Any]:  # fmt: skip
    rows = [row for rows in trajectories for row in rows]
    of = [at for at, rows in enumerate(trajectories) for _ in rows]
    made: Callable[[NDArray[Any]], Any] = NumberList.of if arrays else methodcaller("tolist")
    reward_of = _advantages if own_advantages else _by_token if turn_rewards else attrgetter("reward")
    return {
        "prompt_token_ids": [made(row.prompt) for row in rows],
        "response_ids": [made(row.response) for row in rows],
        "rewards": [reward_of(row) for row in rows],
        "loss_masks": [made(row.trained.view(np.int8)) for row in rows],
        "stop_reasons": [row.finish for row in rows],
        "rollout_metrics": _metrics(rows),
        "rollout_logprobs": _logprobs(rows, arrays),
        "trajectory_ids": [ids[at] for at in of],
        "trajectory_generation_times": [seconds[at] for at in of],
        "trajectory_time_splits": None,
        "rollout_expert_indices": None,
        "is_last_step": [row.last for row in rows] if step_wise else None,
        "env_metrics": [dict(row.metrics) for row in rows],
        "pixel_values": None,
        "image_grid_thw": None,
        "policy_versions": [row.versions for row in rows],
    }


def _logprobs(rows: Sequence[TrainingRow], arrays: bool) -> list[Floats] | list[list[float]] | None:
    columns = [row.logprobs for row in rows if row.logprobs is not None]
    if columns and len(columns) < len(rows):
        raise DataError(
            f"{len(columns)} of {len(rows)} rows came with logprobs, but SkyRL needs those of all rows or of none.",
            remedy="Have every worker send logprobs.",
        )
    if not columns:
        return None
    return columns if arrays else [column.tolist() for column in columns]


def _advantages(row: TrainingRow) -> list[float]:
    if row.advantages is None:
        raise DataError(
            'trainer.algorithm.advantage_estimator is "atropos", but the environment gave no advantages.',
            remedy="Use grpo, or have the environment give Rollout.advantages.",
        )
    values: list[float] = row.advantages.tolist()
    return values


def _by_token(row: TrainingRow) -> list[float]:
    """The reward token by token: turn rewards, and what only the end earned on the last token."""
    values = np.zeros(len(row.response))
    if row.turns is not None:
        values[row.turns.ends - 1] = row.turns.values
    values[-1] += outcome_reward(row.reward, [row.turns])
    made: list[float] = values.tolist()
    return made


def _metrics(rows: Sequence[TrainingRow]) -> dict[str, float]:
    """Means over the whole batch: each of the environment's metrics, the reward, and the spread of versions."""
    named: dict[str, list[float]] = {}
    if rewards := [row.reward for row in rows if row.last]:
        named["atropos/mean_reward"] = rewards
    for row in rows:
        if row.metrics and row.last:
            for name, value in row.metrics.items():
                named.setdefault(f"environment/mean_{name}", []).append(value)
    metrics = {name: float(np.mean(values)) for name, values in named.items()}
    if rows:
        versions, trained = (
            np.concatenate([row.versions for row in rows]),
            np.concatenate([row.trained for row in rows]),
        )
        if trained[first := int(trained.argmax())]:
            versions = np.where(trained, versions, versions[first])
            metrics |= {
                "atropos/min_policy_version": float(versions.min()),
                "atropos/max_policy_version": float(versions.max()),
            }
    return metrics

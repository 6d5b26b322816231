"""Held-out evaluation: the same problems each time, one rollout each, at a temperature of its own."""

from __future__ import annotations

import asyncio
import json
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter

import numpy as np

from atropos_core.errors import DataError, RunDirectoryError
from atropos_core.interfaces import Environment
from atropos_core.rollouts import Player, task_count
from atropos_core.seeds import derive
from atropos_core.types import Draw, Metrics, Sampling, ScoredGroup


@dataclass(frozen=True)
class Evaluation:
    metrics: Metrics  # eval/accuracy, eval/reward, and the mean of every metric that the environments gave
    groups: tuple[ScoredGroup, ...]
    seconds: float
    tokens: int  # sampled

    def write(self, path: Path) -> None:
        """One line a problem."""
        rows = [
            {
                "task": group.task.id,
                "environment": group.draw.environment,
                "correct": episode.correct,
                "reward": float(group.rewards[0]),
                "metrics": dict(episode.metrics),
                "messages": [dict(message) for message in episode.messages],
            }
            if (episode := next(iter(group.episodes), None))
            else {"task": group.task.id, "environment": group.draw.environment, "failed": group.failed[0].cause}
            for group in self.groups
        ]
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("".join(json.dumps(row, ensure_ascii=False, default=str) + "\n" for row in rows))
        except OSError as error:
            raise RunDirectoryError(
                f"{path} cannot be written: {error.strerror}.", remedy="Free some space, or name another place."
            ) from error


async def evaluate(
    player: Player, environments: Mapping[str, Environment], problems: int, sampling: Sampling, *, seed: int
) -> Evaluation:
    """The first `problems` held-out tasks, shared evenly among the environments. A rollout that failed counts as
    wrong. Raises DataError where there is nothing to evaluate, or all of it failed."""
    start = perf_counter()
    share = -(-problems // len(environments))
    draws: list[Draw] = []
    for name, environment in environments.items():
        for index in range(min(share, task_count(name, environment, "test"))):
            draws.append(Draw(len(draws), name, "test", index, derive(seed, "evaluation", name, index)))
    if not draws:
        raise DataError(
            "no environment has held-out tasks to evaluate on.",
            remedy="Give tasks('test'), or set evaluation.problems=0.",
        )
    places = [player.places(draw, 1) for draw in draws]
    groups = await asyncio.gather(
        *(player.play(draw, place, 1, sampling) for draw, place in zip(draws, places, strict=True))
    )
    if not any(group.episodes for group in groups):
        cause = groups[0].failed[0]
        raise DataError(
            f"all {len(groups)} evaluation rollouts failed; the first in {cause.where}: {cause.cause}\n{cause.trace}".rstrip()
        )
    tokens = sum(int(rollout.sampled.sum()) for group in groups for one in group.episodes for rollout in one.rollouts)
    return Evaluation(_metrics(groups), tuple(groups), perf_counter() - start, tokens)


def greedy(sampling: Sampling, temperature: float) -> Sampling:
    return (
        replace(sampling, temperature=temperature, top_p=1.0, top_k=0)
        if temperature == 0
        else replace(sampling, temperature=temperature)
    )


def _metrics(groups: list[ScoredGroup]) -> Metrics:
    values: dict[str, list[float]] = defaultdict(list)
    failed: dict[str, int] = defaultdict(int)
    names = {group.draw.environment for group in groups}
    for group in groups:
        prefixes = ["eval"] if len(names) == 1 else ["eval", f"eval/{group.draw.environment}"]
        for prefix in prefixes:
            if not group.episodes:
                failed[prefix] += 1
                continue
            episode = group.episodes[0]
            values[f"{prefix}/reward"].append(float(group.rewards[0]))
            if episode.correct is not None:
                values[f"{prefix}/accuracy"].append(float(episode.correct))
            for name, value in episode.metrics.items():
                values[f"{prefix}/{name}"].append(float(value))
    for prefix, count in failed.items():
        if f"{prefix}/accuracy" in values:  # where nothing is right or wrong, a failure is not wrong either
            values[f"{prefix}/accuracy"] += [0.0] * count
    metrics = {name: float(np.mean(entries)) for name, entries in values.items()}
    return metrics | {
        "eval/problems": float(len(groups)),
        "eval/failed": float(sum(not group.episodes for group in groups)),
    }

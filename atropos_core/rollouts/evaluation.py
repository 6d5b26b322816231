"""Held-out evaluation: the same problems and seeds each time, with its own sampling settings."""

from __future__ import annotations

import asyncio
import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

from atropos_core.config.run_file import EvaluationSection
from atropos_core.console.waits import Wait, waiting
from atropos_core.errors import DataError
from atropos_core.interfaces import Environment
from atropos_core.rollouts.engine_policy import ScheduleKey
from atropos_core.rollouts.evaluation_statistics import pass_at_k, wilson
from atropos_core.rollouts.producer import CHECK_IT, with_trace
from atropos_core.rollouts.runner import RolloutRunner, task_count
from atropos_core.rollouts.task_digests import digest_of
from atropos_core.seeds import derive
from atropos_core.storage.atomic import write_output
from atropos_core.types import ABSTAINED, Draw, Episode, Metrics, Sampling, ScoredGroup

IN_FLIGHT = 1024  # rollouts at once: what waits for an engine spends its own deadline
VERDICT = "accuracy_"  # an environment's metric of this name, 0 or 1, is a further grader's accuracy


@dataclass(frozen=True)
class Share:
    """A mean over problems with Wilson's 95 % interval, over problems because replies to one problem are not independent."""

    value: float
    low: float
    high: float
    problems: int


@dataclass(frozen=True)
class Evaluation:
    metrics: Metrics  # eval/accuracy, eval/pass@k, eval/reward, and the mean of every metric that the environments gave
    shares: Mapping[str, Share]  # those metrics that are accuracies, by the same names
    groups: tuple[ScoredGroup, ...]
    seconds: float
    tokens: int  # sampled

    def write(self, path: Path) -> None:
        """Write one line per problem, with each of its samples."""
        write_output(
            path, "".join(json.dumps(_row(group), ensure_ascii=False, default=str) + "\n" for group in self.groups)
        )


def require_test_tasks(tasks: int) -> None:
    """Raises DataError if there is nothing to evaluate on."""
    if not tasks:
        raise DataError(
            "no environment has held-out tasks to evaluate on.",
            remedy="Have tasks('test') give some; a run does without by evaluation.problems=0.",
        )


async def evaluated_tasks(environments: Mapping[str, Environment], section: EvaluationSection) -> dict[str, str]:
    """Return a digest of the tasks that `evaluate` runs, by environment; "" for lazy tasks."""
    return {
        name: await digest_of(environment.tasks("test"), _share_of(section, environments))
        for name, environment in environments.items()
    }


def _share_of(section: EvaluationSection, environments: Mapping[str, Environment]) -> int:
    return -(-section.problems // len(environments))


async def evaluate(
    runner: RolloutRunner,
    environments: Mapping[str, Environment],
    section: EvaluationSection,
    sampling: Sampling,
    *,
    seed: int,
) -> Evaluation:
    """Run the first `section.problems` held-out tasks, shared evenly among the environments, `section.samples` times each. `sampling`
    is the run's, for values that the section does not set. A failed rollout counts as wrong. Raises DataError if there is
    nothing to evaluate, or everything failed."""
    start = perf_counter()
    share = _share_of(section, environments)
    draws: list[Draw] = []
    for name, environment in environments.items():
        for index in range(min(share, task_count(name, environment, "test"))):
            draws.append(Draw(len(draws), name, "test", index, derive(seed, "evaluation", name, index)))
    require_test_tasks(len(draws))
    with waiting(f"{len(draws):,} held-out problems to be evaluated") as wait:
        groups = await _run(runner, draws, section, section.sampling(sampling), wait)
    tokens = sum(_sampled(episode) for group in groups for episode in group.episodes)
    shares = _shares(groups, section.ks())
    metrics = {name: share.value for name, share in shares.items()} | _means(groups, shares)
    return Evaluation(metrics, shares, tuple(groups), perf_counter() - start, tokens)


async def _run(
    runner: RolloutRunner, draws: Sequence[Draw], section: EvaluationSection, sampling: Sampling, wait: Wait
) -> list[ScoredGroup]:
    """Return a group for each draw, in their order; `wait` shows how many are done."""
    done = 0

    async def one(draw: Draw, keys: Sequence[ScheduleKey]) -> ScoredGroup:
        nonlocal done
        group = await runner.run(draw, keys, section.samples, sampling)
        done += 1
        wait.done = f"{done:,} done"
        return group

    groups: list[ScoredGroup] = []
    at_once = max(1, IN_FLIGHT // section.samples)
    for begin in range(0, len(draws), at_once):
        part = draws[begin : begin + at_once]
        keys = [runner.schedule_keys(draw, section.samples) for draw in part]
        groups += await asyncio.gather(*(one(draw, key) for draw, key in zip(part, keys, strict=True)))
        if begin == 0 and not any(group.episodes for group in groups):
            cause = groups[0].failed[0]
            raise with_trace(
                DataError(
                    f"the first {len(groups) * section.samples} evaluation rollouts all failed; the first in {cause.where}: "
                    f"{cause.cause}",
                    remedy=CHECK_IT,
                ),
                cause,
            )
    return groups


def _shares(groups: Sequence[ScoredGroup], ks: Sequence[int]) -> dict[str, Share]:
    """Return accuracy (which is pass@1) and pass@k of every grader: over all problems, and by environment if there are several."""
    names = _names(groups)
    several = len(names) > 1
    graders = {name: _graders([group for group in groups if group.draw.environment == name]) for name in names}
    values: dict[str, list[float]] = defaultdict(list)
    for group in groups:
        n = len(group.episodes) + len(group.failed)
        for grader in graders[group.draw.environment]:
            verdicts = [verdict for episode in group.episodes if (verdict := _verdict(episode, grader)) is not None]
            if group.episodes and not verdicts:
                continue  # run, and nothing about it is right or wrong
            ending = grader.removeprefix("accuracy")
            for prefix in ("eval", f"eval/{group.draw.environment}") if several else ("eval",):
                values[f"{prefix}/accuracy{ending}"].append(sum(verdicts) / n)
                for k in ks:
                    values[f"{prefix}/pass@{k}{ending}"].append(pass_at_k(n, sum(verdicts), k))
    means = {name: (float(np.mean(entries)), len(entries)) for name, entries in values.items()}
    return {name: Share(mean, *wilson(mean, problems), problems) for name, (mean, problems) in means.items()}


def _names(groups: Sequence[ScoredGroup]) -> list[str]:
    return list(dict.fromkeys(group.draw.environment for group in groups))


def _graders(groups: Sequence[ScoredGroup]) -> list[str]:
    """Return the graders of one environment: `accuracy` for its own verdict, and its metrics that are verdicts too."""
    episodes = [episode for group in groups for episode in group.episodes]
    named = {name for episode in episodes for name in episode.metrics if name.startswith(VERDICT)}
    binary = [name for name in named if {episode.metrics.get(name, 0.0) for episode in episodes} <= {0.0, 1.0}]
    own = ["accuracy"] if any(episode.correct is not None for episode in episodes) else []
    return own + sorted(binary)


def _verdict(episode: Episode, grader: str) -> bool | None:
    if grader == "accuracy":
        return episode.correct
    return episode.metrics[grader] == 1.0 if grader in episode.metrics else None


def _means(groups: Sequence[ScoredGroup], shares: Mapping[str, Share]) -> Metrics:
    """Return the values that are not shares, each averaged over the episodes that have it."""
    values: dict[str, list[float]] = defaultdict(list)
    several = len(_names(groups)) > 1
    for group in groups:
        for prefix in ("eval", f"eval/{group.draw.environment}") if several else ("eval",):
            scored = [ABSTAINED not in episode.metrics for episode in group.episodes]
            values[f"{prefix}/reward"] += group.rewards[scored].tolist()
            for episode in group.episodes:
                for name, value in episode.metrics.items():
                    if name != ABSTAINED:
                        values[f"{prefix}/{name}"].append(float(value))
    means = {name: float(np.mean(entries)) for name, entries in values.items() if entries and name not in shares}
    return means | {
        "eval/problems": float(len(groups)),
        "eval/cut_off_lowest": cut_off_lowest(groups),
        "eval/failed": float(sum(len(group.failed) for group in groups)),
    }


def cut_off_lowest(groups: Sequence[ScoredGroup]) -> float:
    """Return the share of the episodes that were cut off at max_tokens, are not correct, and have a reward close to the lowest.
    If all rewards are equal and above 0, cut-off episodes do not count."""
    episodes = [episode for group in groups for episode in group.episodes]
    if not episodes:
        return 0.0
    rewards = np.concatenate([group.rewards for group in groups])
    if rewards.min() == rewards.max() > 0:
        return 0.0
    low = rewards <= rewards.min() + 0.1 * (rewards.max() - rewards.min())
    cut = [episode.finish == "length" and episode.correct is not True for episode in episodes]
    return float((low & np.array(cut)).mean())


def _row(group: ScoredGroup) -> dict[str, Any]:
    samples = [_sample(episode, float(reward)) for episode, reward in zip(group.episodes, group.rewards, strict=True)]
    return {
        "task": group.task.id,
        "environment": group.draw.environment,
        "correct": sum(episode.correct is True for episode in group.episodes),
        "total": len(group.episodes) + len(group.failed),
        "samples": [*samples, *({"failed": failed.cause, "where": failed.where} for failed in group.failed)],
    }


def _sample(episode: Episode, reward: float) -> dict[str, Any]:
    return {
        "correct": episode.correct,
        "reward": reward,
        "metrics": dict(episode.metrics),
        "finish": episode.finish,
        "tokens": _sampled(episode),
        "messages": [dict(message) for message in episode.messages],
    }


def _sampled(episode: Episode) -> int:
    return sum(int(rollout.sampled.sum()) for rollout in episode.rollouts)

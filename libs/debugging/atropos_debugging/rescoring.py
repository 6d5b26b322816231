"""Score the recorded rollouts of a run again, without a model, and compare: rewards, advantages, and what each step would have
trained."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from atropos_core.config.run_file import load, read_file
from atropos_core.console.waits import waiting
from atropos_core.errors import DataError, EventLoopBlocked
from atropos_core.guards.open_component import in_one_line
from atropos_core.health.reward_rescoring import last_reply, only_scores
from atropos_core.interfaces import Environment, Measured, Stateful
from atropos_core.launch.builder import scoring_parts
from atropos_core.launch.plan import Plan
from atropos_core.processes.proxies import HostedReward
from atropos_core.rollouts.runner import failed_by
from atropos_core.training.parts import ScoringParts
from atropos_core.turn_rewards import placed, with_turns
from atropos_core.types import ABSTAINED, Episode, Failed, Floats, Score, ScoredGroup, Task
from atropos_debugging.agreement import Scores
from atropos_debugging.component_calls import ComponentCalls, scoring_runner
from atropos_debugging.foreign_rollouts import foreign_groups
from atropos_debugging.recorded_groups import (
    RecordedGroup,
    recorded_groups,
    turns_of_environment,
    without_turns,
)
from atropos_records.rollout_records import EpisodeRecord, RolloutRecords

TURNS_LEFT_OUT = (
    "turn rewards are recorded as the sum of all rewards: those that the environment placed are left out, and only those that "
    "rewards place now count"
)
CAUSES = 3  # different causes of failures that are kept
AT_ONCE = 64  # groups that rewards score at the same time
EXAMPLES = 50  # groups with a changed sign that are kept


@dataclass
class StepChange:
    """One recorded step before and now. Means are over the rollouts that the step leased."""

    step: int
    groups: int = 0  # leased
    trained_before: int = 0
    trained_now: int = 0
    signs_changed: int = 0  # groups in which an advantage changed its sign
    reward_before: float = math.nan
    reward_now: float = math.nan
    direction: float = math.nan  # cosine of all advantages of the step before and now; 1: the same up to a factor


@dataclass(frozen=True)
class ChangedGroup:
    """A group in which the advantage of at least one rollout changed its sign."""

    step: int
    draw: int
    environment: str
    task: str
    rewards_before: Sequence[float]
    rewards_now: Sequence[float]
    advantages_before: Sequence[float]
    advantages_now: Sequence[float]


@dataclass
class Rescored:
    """The result of scoring a run's rollouts again."""

    steps: list[StepChange] = field(default_factory=list)
    rollouts: int = 0
    groups: int = 0
    compared_groups: int = 0  # whose advantages before are known
    signs_changed: int = 0
    failed_groups: int = 0  # whose rollouts a reward could not score
    causes: Counter[str] = field(default_factory=Counter)
    total: Scores = field(default_factory=Scores)
    parts: dict[str, Scores] = field(default_factory=dict)  # of rewards that the run had too, by name
    changed: list[ChangedGroup] = field(default_factory=list)  # the first of them
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class RolloutChange:
    """One rollout before and now, as `--out` writes it. NaN: unknown, or not scored."""

    line: EpisodeRecord
    reward: float
    parts: Mapping[str, float]
    advantage_before: float
    advantage: float
    trained: bool


@dataclass(frozen=True)
class Recorded:
    """Rollouts to score: the numbers of their steps, and a function that reads the groups of one, and a note about it or ""."""

    steps: Sequence[int]
    read: Callable[[int], tuple[Sequence[RecordedGroup], str]]
    turns_of_environment: bool = True  # what is placed inside rollouts is the environment's own


def of_run(records: RolloutRecords, steps: Sequence[int]) -> Recorded:
    """Return the rollouts of these steps of a run, of all steps if `steps` is empty. Raises DataError if there are none."""
    chosen = sorted(set(steps)) or records.steps()
    if not chosen:
        raise DataError(
            f"{records.directory} has no recorded rollouts.",
            remedy="A run records them with [sink.jsonl] and rollouts_every above 0, which is the default.",
        )

    def read(number: int) -> tuple[Sequence[RecordedGroup], str]:
        step = records.step(number)
        why = "" if step.tokens is not None else f"step {number}: {step.why_no_tokens}; rewards can only read messages"
        return list(recorded_groups(step)), why

    rewards = load([replace(read_file(records.directory / "config.toml"), whole=True)]).config.reward
    return Recorded(chosen, read, turns_of_environment(rewards))


def of_file(path: Path) -> Recorded:
    """Return the rollouts of another library's file. Raises ConfigError, DataError."""
    by_step: dict[int, list[RecordedGroup]] = {}
    for one in foreign_groups(path):
        by_step.setdefault(one.step, []).append(one)
    return Recorded(sorted(by_step), lambda number: (by_step[number], ""))


async def rescore(
    recorded: Recorded, plan: Plan, scratch: Path, write: Callable[[RolloutChange], None] | None = None
) -> Rescored:
    """Score recorded rollouts again, with one step in memory at a time. `write` is called with each rollout. Raises DataError if no
    group could be scored."""
    found = Rescored()
    async with scoring_parts(plan, scratch) as parts:
        scoring = _Scoring(parts, found, recorded.turns_of_environment)
        _note_limits(plan, parts, recorded.steps, found)
        for number in recorded.steps:
            with waiting(f"the rewards of step {number}"):
                groups, note = recorded.read(number)
                found.notes += [note] if note else []
                await scoring.step(number, groups, plan.config.training.min_group, write)
    if found.groups and found.failed_groups == found.groups:
        raise DataError(f"no group could be scored: {next(iter(found.causes))}")
    return found


class _Scoring:
    """Scores step after step, so that transforms with running statistics see the steps in their order."""

    def __init__(self, parts: ScoringParts, found: Rescored, keep_turns: bool) -> None:
        self._parts = parts
        self._found = found
        self._keep_turns = keep_turns
        self._slots = asyncio.Semaphore(AT_ONCE)
        self._calls = ComponentCalls()
        self._runner = scoring_runner(parts.rewards, self._calls)

    async def step(
        self,
        number: int,
        groups: Sequence[RecordedGroup],
        min_group: int,
        write: Callable[[RolloutChange], None] | None,
    ) -> None:
        if not self._keep_turns:
            groups = [self._without_turns(one) for one in groups]
        scored = await asyncio.gather(*(self._score(one) for one in groups))
        found = self._found
        leased = [now for one, now in zip(groups, scored, strict=True) if one.was_leased]
        kept = await self._transform([now for now in leased if len(now.episodes) >= max(min_group, 1)])
        trained = {now.draw.id: now for now in kept}
        change = StepChange(number)
        before: list[Floats] = []
        after: list[Floats] = []
        sums = np.zeros(3)  # rewards before, rewards now, rollouts
        for one, now in zip(groups, scored, strict=True):
            rewards = _aligned(one, now)
            advantages = _advantages_now(one, trained.get(now.draw.id))
            was = _advantages_before(one)
            self._count(one, now)
            self._compare(one, now, rewards)
            if one.was_leased:
                change.groups += 1
                change.trained_before += one.was_trained
                change.trained_now += now.draw.id in trained
                known = ~np.isnan(rewards)
                sums += one.group.rewards[known].sum(), rewards[known].sum(), known.sum()
                if was is not None and now.episodes:
                    found.compared_groups += 1
                    before.append(was)
                    after.append(advantages)
                    if (np.sign(was) * np.sign(advantages) < 0).any():
                        change.signs_changed += 1
                        self._keep(number, one, rewards, was, advantages)
            if write is not None:
                unknown = np.full(len(one.lines), np.nan, np.float32) if was is None else was
                parts = _parts_now(one, now)
                for member, line in enumerate(one.lines):
                    each = {name: float(values[member]) for name, values in parts.items()}
                    numbers = float(rewards[member]), each, float(unknown[member]), float(advantages[member])
                    write(RolloutChange(line, *numbers, now.draw.id in trained))
        if sums[2]:
            change.reward_before, change.reward_now = float(sums[0] / sums[2]), float(sums[1] / sums[2])
        change.direction = _cosine(before, after)
        found.signs_changed += change.signs_changed
        found.steps.append(change)

    def _without_turns(self, one: RecordedGroup) -> RecordedGroup:
        """Take away turn rewards that several rewards placed: the part that the environment placed is not recorded."""
        group = without_turns(one.group)
        if group is not one.group and TURNS_LEFT_OUT not in self._found.notes:
            self._found.notes.append(TURNS_LEFT_OUT)
        return replace(one, group=group)

    def _count(self, one: RecordedGroup, now: ScoredGroup) -> None:
        found = self._found
        found.groups += 1
        found.rollouts += len(one.lines)
        if not now.episodes:
            found.failed_groups += 1
            cause = now.failed[-1].cause
            if cause in found.causes or len(found.causes) < CAUSES:
                found.causes[cause] += 1

    async def _score(self, one: RecordedGroup) -> ScoredGroup:
        async with self._slots:
            return await self._scored(one)

    async def _scored(self, one: RecordedGroup) -> ScoredGroup:
        task, episodes = one.group.task, list[Episode | Failed](one.group.episodes)
        environment = self._parts.environments.get(one.group.draw.environment)
        if environment is not None:
            task = _task_of(environment, one)
            if _scores_again(environment):
                episodes = [await self._with_score(environment, task, episode) for episode in one.group.episodes]
        return await self._runner.score(one.group.draw, task, episodes)

    async def _with_score(self, environment: Environment, task: Task, episode: Episode) -> Episode | Failed:
        """Return the episode with the score that the environment gives its last reply now."""
        try:
            given = await self._calls.made(f"score() of task {task.id!r}", environment.score(task, last_reply(episode)))
            score = given if isinstance(given, Score) else Score(given)
            rollouts = episode.rollouts
            if score.turns is not None:
                rollouts = with_turns(rollouts, placed(rollouts, score.turns))
            value = float(score.value)
            if not math.isfinite(value):
                raise DataError(f"score() gave {value} for task {task.id!r}: it is not a finite number")
        except EventLoopBlocked:
            raise
        except Exception as error:  # noqa: BLE001 - the plugin boundary: an environment's code
            return failed_by(error, "score")
        return replace(
            episode,
            rollouts=rollouts,
            score=value,
            correct=score.correct,
            parts=dict(score.parts),
            metrics={**score.metrics, ABSTAINED: 1.0} if score.abstains else dict(score.metrics),
        )

    async def _transform(self, groups: Sequence[ScoredGroup]) -> Sequence[ScoredGroup]:
        for name, transform in self._parts.transforms.items():
            with in_one_line(f"transform {name!r} failed"):
                groups = await self._calls.made(f"transform {name!r}", transform(groups))
        return groups

    def _compare(self, one: RecordedGroup, now: ScoredGroup, rewards: Floats) -> None:
        self._found.total.add(one.group.rewards, rewards)
        for name, values in _parts_now(one, now).items():
            if name in one.group.parts:
                self._found.parts.setdefault(name, Scores()).add(one.group.parts[name], values)

    def _keep(self, step: int, one: RecordedGroup, rewards: Floats, was: Floats, now: Floats) -> None:
        if len(self._found.changed) < EXAMPLES:
            draw = one.group.draw
            values = [column.astype(float).tolist() for column in (one.group.rewards, rewards, was, now)]
            self._found.changed.append(ChangedGroup(step, draw.id, draw.environment, one.group.task.id, *values))


def _note_limits(plan: Plan, parts: ScoringParts, steps: Sequence[int], found: Rescored) -> None:
    """Note what this comparison leaves out."""
    if plan.config.api is not None:
        found.notes.append(
            "workers scored these rollouts with the rewards of their own run files: --config FILE gives one of these"
        )
    if plan.config.teacher:
        found.notes.append("teachers are not asked again: what they would have taught is left out")
    gaps = [step for before, step in pairwise(steps) if step != before + 1]
    named = {f"transform {name!r}": part for name, part in parts.transforms.items()}
    for label, part in {**named, **{f"reward {of.name!r}": of.reward for of in parts.rewards}}.items():
        if isinstance(part, Stateful) and (gaps or steps[0] != 1):
            found.notes.append(f"{label} has running statistics, and does not see the steps that are missing here")
    for of in parts.rewards:
        if isinstance(of.reward, HostedReward) and not parts.environments:
            found.notes.append(
                f"reward {of.name!r} runs in its own process, where task.data are empty: they are not recorded; "
                "--environments has them"
            )
    for name, environment in parts.environments.items():
        if not _scores_again(environment):
            found.notes.append(f"environment {name!r} scores within its own rollout: its recorded scores are kept")


def _scores_again(environment: Environment) -> bool:
    return only_scores(environment) and not isinstance(environment, Stateful | Measured)


def _task_of(environment: Environment, one: RecordedGroup) -> Task:
    """Return the environment's own task. Raises DataError if it is not the recorded one."""
    draw, recorded = one.group.draw, one.group.task
    if one.lines[0].task_index is None:
        raise DataError(
            f"step {one.step}: the number of task {recorded.id!r} is not recorded.",
            remedy="Leave out --environments: the run is of an earlier version.",
        )
    tasks = environment.tasks(draw.split)
    task = tasks[draw.index] if draw.index < len(tasks) else None
    if task is None or task.id != recorded.id:
        has = "has no such task" if task is None else f"has task {task.id!r} there"
        raise DataError(
            f"step {one.step}: task {recorded.id!r} was number {draw.index} of environment {draw.environment!r}, which {has} now.",
            remedy="Give it the data that the run had, or leave out --environments.",
        )
    return task


def _members(one: RecordedGroup, now: ScoredGroup) -> list[int]:
    """Return the recorded number of each episode of a scored group, which leaves out those that abstain."""
    if len(now.episodes) == len(one.lines):
        return list(range(len(one.lines)))
    kept = {id(messages): member for member, messages in enumerate(line.messages for line in one.lines)}
    return [kept[id(episode.messages)] for episode in now.episodes]


def _aligned(one: RecordedGroup, now: ScoredGroup) -> Floats:
    """Return the rewards now [G] of the recorded episodes; NaN for one that was not scored."""
    made = np.full(len(one.lines), np.nan, np.float32)
    made[_members(one, now)] = now.rewards
    return made


def _parts_now(one: RecordedGroup, now: ScoredGroup) -> dict[str, Floats]:
    made = {}
    for name, values in now.parts.items():
        made[name] = np.full(len(one.lines), np.nan, np.float32)
        made[name][_members(one, now)] = values
    return made


def _advantages_now(one: RecordedGroup, trained: ScoredGroup | None) -> Floats:
    """Return the advantages now [G]; 0 for what would not be trained."""
    made = np.zeros(len(one.lines), np.float32)
    if trained is not None and trained.advantages is not None:
        made[_members(one, trained)] = trained.advantages
    return made


def _advantages_before(one: RecordedGroup) -> Floats | None:
    """Return the advantages [G] that were trained; 0 if the group was not; None if they are not recorded, or were each token's
    own."""
    return one.group.advantages if one.was_trained else np.zeros(len(one.lines), np.float32)


def _cosine(before: Sequence[Floats], now: Sequence[Floats]) -> float:
    if not before:
        return math.nan
    first, second = np.concatenate(before).astype(np.float64), np.concatenate(now).astype(np.float64)
    scale = math.sqrt(float(first @ first) * float(second @ second))
    return float(first @ second) / scale if scale else math.nan


def document(found: Rescored) -> dict[str, Any]:
    """Return the result as JSON."""
    return {
        "rollouts": found.rollouts,
        "groups": found.groups,
        "failed_groups": found.failed_groups,
        "causes": dict(found.causes),
        "reward": found.total.agreement().record(),
        "parts": {name: scores.agreement().record() for name, scores in found.parts.items()},
        "compared_groups": found.compared_groups,
        "signs_changed": found.signs_changed,
        "steps": [vars(one) for one in found.steps],
        "changed_groups": [vars(one) for one in found.changed],
        "notes": found.notes,
    }

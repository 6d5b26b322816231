"""Run and score a draw's rollouts. A rollout that fails is recorded as data; a part of the run that fails ends the run."""

from __future__ import annotations

import asyncio
import inspect
import time
import traceback
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, nullcontext
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np

from atropos_core import console
from atropos_core.errors import (
    AtroposError,
    ConfigError,
    DataError,
    DeadlineExceeded,
    EventLoopBlocked,
    MessageDropped,
    ProcessDied,
)
from atropos_core.group_schema import LARGEST_REWARD, LOOK_S, check_episode, check_failed, check_group, check_tasks
from atropos_core.guards.deadlines import within
from atropos_core.guards.exits import contained, file_and_line, line_of_component
from atropos_core.interfaces import Engine, Environment, Reward
from atropos_core.observe.profile import Profile, timed
from atropos_core.processes.reward_metrics import ReportedMetrics, reported_metrics, with_metrics
from atropos_core.rollouts.engine_policy import ChatFormat, EnginePolicy, ScheduleKey, Turnstile
from atropos_core.rollouts.gold_tasks import GoldTasks
from atropos_core.rollouts.replies import AS_SAMPLED
from atropos_core.rollouts.tool_sets import Tools, ToolSets
from atropos_core.seeds import derive
from atropos_core.turn_rewards import Placed, mixed, split_scores
from atropos_core.types import ABSTAINED, Draw, Episode, Failed, Floats, Sampling, ScoredGroup, Split, Task

FATAL = (ProcessDied, MessageDropped)  # errors that end the run instead of failing one rollout
FIRST_TESTED, FIRST_TRAINED = 16, 512  # tasks that are compared
MOST_BLOCKED = 3  # interruptions of blocking code in a row; the run stands still for BLOCKED_AFTER_S before each


@dataclass(frozen=True)
class WeightedReward:
    name: str
    reward: Reward
    weight: float
    deadline_s: float
    gold: GoldTasks | None = None  # of the gold reward, which is not added to the others


class RolloutRunner:
    """Runs draws of several environments with one engine, and scores them."""

    def __init__(
        self,
        environments: Mapping[str, Environment],
        rewards: Sequence[WeightedReward],
        engine: Engine,
        tokenizer: ChatFormat,
        *,
        deadline_s: float,
        deterministic: bool,
        profile: Profile | None = None,
        vocabulary: int = 0,
        fatal: tuple[type[AtroposError], ...] = (),
    ) -> None:
        """`vocabulary`: number of token ids of the policy; 0: unknown. `fatal`: errors of rewards that are raised, and do not only
        fail a group."""
        self.environments = environments
        self.waiting_for_slot = 0  # rollouts whose environment runs no more at once
        self.admitted = 0  # rollouts that began in an environment with such a bound
        self._vocabulary = vocabulary
        self._profile = profile
        self._rewards = rewards
        self._engine = engine
        self._tokenizer = tokenizer
        self._deadline_s = deadline_s
        self._turnstile = Turnstile() if deterministic else None
        self._tool_sets = ToolSets()
        self._blocked: Counter[str] = Counter()  # component -> calls in a row that blocked the event loop
        self._fatal: tuple[type[AtroposError], ...] = (*FATAL, ConfigError, *fatal)

    @classmethod
    def for_scores(cls, rewards: Sequence[WeightedReward], fatal: tuple[type[AtroposError], ...] = ()) -> RolloutRunner:
        """Return a runner without environments and engine: only `score` can be called, which raises errors of a reward that are
        `fatal`."""
        nothing: Any = None
        return cls({}, rewards, nothing, nothing, deadline_s=0.0, deterministic=False, fatal=fatal)

    def tools_of(self, group: ScoredGroup) -> Tools:
        """Return the JSON schemas of the tools that the policy was shown for this task; empty if there were none, or the rollout ran
        elsewhere."""
        return self._tool_sets.of((id(self.environments.get(group.draw.environment)), group.task.id))

    def schedule_keys(self, draw: Draw, n: int) -> list[ScheduleKey]:
        """Return the keys of a draw's rollouts. Call this for all draws of a round before any rollout starts."""
        keys: list[ScheduleKey] = [
            (draw.id, member) for member in range(1 if runs_groups(self.environments[draw.environment]) else n)
        ]
        if self._turnstile is not None:
            for key in keys:
                self._turnstile.enter(key)
        return keys

    async def run(
        self, draw: Draw, keys: Sequence[ScheduleKey], n: int, sampling: Sampling, *, attempts: int = 1
    ) -> ScoredGroup:
        """Return `n` scored episodes of the draw's task. Failed rollouts are in `failed`; all may have failed. With more `attempts`,
        a failed rollout is run again with another seed (or its whole group, if the environment runs groups). `failed` also has
        the earlier failures, before the last ones."""
        environment = self.environments[draw.environment]
        try:
            with contained(f"tasks({draw.split!r})"):
                task = environment.tasks(draw.split)[draw.index]
        except Exception as error:  # the plugin boundary: without the task there is nothing to record a failure under
            raise DataError(
                f"environment {draw.environment!r}: tasks({draw.split!r})[{draw.index}] raised {type(error).__name__}: {error}"
            ) from error
        seeds = [derive(draw.seed, member) for member in range(n)]
        with timed(self._profile, f"environment.{draw.environment}/rollout", n):
            results = await self._run_members(environment, task, keys, seeds, sampling)
            before: list[Episode | Failed] = []
            for attempt in range(1, attempts):
                lost = [member for member, one in enumerate(results) if isinstance(one, Failed)]
                if not lost:
                    break
                before += [results[member] for member in lost]
                if runs_groups(environment):
                    lost = list(range(n))
                where = keys if runs_groups(environment) else [keys[member] for member in lost]
                if self._turnstile is not None:
                    for key in where:
                        self._turnstile.enter(key)
                again = [derive(seeds[member], attempt) for member in lost]
                for member, one in zip(
                    lost, await self._run_members(environment, task, where, again, sampling), strict=True
                ):
                    results[member] = one
        return await self.score(draw, task, [*before, *results])

    async def _run_members(
        self,
        environment: Environment,
        task: Task,
        keys: Sequence[ScheduleKey],
        seeds: Sequence[int],
        sampling: Sampling,
    ) -> list[Episode | Failed]:
        """Return one result per seed, in their order."""
        if runs_groups(environment):
            return list(await self._run_group(environment, task, keys[0], seeds, sampling))
        one = [self._run_one(environment, task, key, seed, sampling) for key, seed in zip(keys, seeds, strict=True)]
        return list(await asyncio.gather(*one))

    async def _run_one(
        self, environment: Environment, task: Task, key: ScheduleKey, seed: int, sampling: Sampling
    ) -> Episode | Failed:
        policy = self._policy(key, sampling)
        try:
            async with AsyncExitStack() as slot:
                self.waiting_for_slot += 1
                try:
                    await slot.enter_async_context(self._slot(environment))
                finally:
                    self.waiting_for_slot -= 1
                self.admitted += environment.at_once is not None
                with contained("rollout()"):
                    results = await within(environment.rollout(task, policy, seed=seed), self._deadline_s, "rollout()")
                self._blocked.pop(f"rollout() of {type(environment).__name__}", None)
                return self._checked(environment, task, results)
        except MessageDropped as error:
            raise self._named(environment, task, error) from error
        except FATAL:
            raise
        except (Exception, EventLoopBlocked) as error:  # noqa: BLE001 - the plugin boundary: an environment's code
            self._count_blocked(f"rollout() of {type(environment).__name__}", error)
            return failed_by(error, "rollout")
        finally:
            self._tool_sets.note((id(environment), task.id), policy.tools)
            self._leave(key)

    async def _run_group(
        self, environment: Environment, task: Task, key: ScheduleKey, seeds: Sequence[int], sampling: Sampling
    ) -> Sequence[Episode | Failed]:
        policy = self._policy(key, sampling)
        try:
            with contained("rollout_group()"):
                results = await within(
                    environment.rollout_group(task, policy, len(seeds), seeds=seeds),
                    self._deadline_s,
                    "rollout_group()",
                )
            self._blocked.pop(f"rollout_group() of {type(environment).__name__}", None)
            if len(results) != len(seeds):
                raise DataError(f"rollout_group() was called for {len(seeds)} rollouts and gave {len(results)}")
            for one in results:
                if isinstance(one, FATAL):
                    raise one
            return [
                failed_by(one, "rollout") if isinstance(one, BaseException) else self._checked(environment, task, one)
                for one in results
            ]
        except MessageDropped as error:
            raise self._named(environment, task, error) from error
        except FATAL:
            raise
        except (Exception, EventLoopBlocked) as error:  # noqa: BLE001 - the plugin boundary: an environment's code
            self._count_blocked(f"rollout_group() of {type(environment).__name__}", error)
            return [failed_by(error, "rollout_group")] * len(seeds)
        finally:
            self._tool_sets.note((id(environment), task.id), policy.tools)
            self._leave(key)

    def _count_blocked(self, component: str, error: BaseException) -> None:
        """Say at once that code blocked the event loop. Raises the error if this happened MOST_BLOCKED times in a row."""
        if not isinstance(error, EventLoopBlocked):
            return
        self._blocked[component] += 1
        if self._blocked[component] < MOST_BLOCKED:
            console.warn(f"{component} was interrupted and counts as failed: {Exception.__str__(error)}")
        else:
            raise EventLoopBlocked(f"{component}, {MOST_BLOCKED} times in a row: {Exception.__str__(error)}") from error

    def _checked(self, environment: Environment, task: Task, results: Episode | Failed) -> Episode | Failed:
        """Check a result. Raises DataError that names the environment and the task."""
        try:
            return checked_episode(results, self._vocabulary)
        except DataError as error:
            raise self._named(environment, task, error) from error

    def _named(self, environment: Environment, task: Task, error: DataError) -> DataError:
        """Return the error with the names of the environment and the task."""
        name = next(name for name, one in self.environments.items() if one is environment)
        kind = MessageDropped if isinstance(error, MessageDropped) else DataError
        return kind(f"environment {name!r}, task {task.id!r}: {Exception.__str__(error)}", remedy=error.remedy)

    async def score(self, draw: Draw, task: Task, results: Sequence[Episode | Failed]) -> ScoredGroup:
        """Score the episodes of a draw with the rewards, by weight. The gold reward scores its share of the tasks, and is not added. If
        a reward fails, all of them count as failed."""
        episodes = tuple(one for one in results if isinstance(one, Episode))
        failed = tuple(one for one in results if isinstance(one, Failed))
        if not episodes:
            return ScoredGroup(draw, task, (), np.zeros(0, np.float32), {}, failed)

        def lost(error: BaseException) -> ScoredGroup:
            every = (*failed, *[failed_by(error, "reward")] * len(episodes))
            return ScoredGroup(draw, task, (), np.zeros(0, np.float32), {}, every)

        trained = [of for of in self._rewards if of.gold is None]
        asked = [of for of in self._rewards if of.gold is None or of.gold.has(draw, task)]
        if all(getattr(of.reward, "of_environment", False) for of in trained):
            scored = tuple(one for one in episodes if ABSTAINED not in one.metrics)
            episodes = scored or episodes  # a group without any score is flat
        total = np.zeros(len(episodes), np.float64)
        parts: dict[str, Floats] = {}
        try:
            answers = await asyncio.gather(*(self._call_reward(of, task, episodes) for of in asked))
        except self._fatal:
            raise
        except EventLoopBlocked:  # too often in a row
            raise
        except AtroposError as error:
            return lost(error)
        for of, (rewards, _, _) in zip(asked, answers, strict=True):
            parts[of.name] = rewards
            if of.gold is None:
                total += of.weight * rewards.astype(np.float64)
        if not (np.abs(total) <= LARGEST_REWARD).all():
            return lost(DataError(f"the rewards of task {task.id!r} times their weights make {total.tolist()!r:.200}"))
        turns = [
            (of.weight, given)
            for of, (_, given, _) in zip(asked, answers, strict=True)
            if given is not None and of.gold is None
        ]
        reported = [metrics for _, _, metrics in answers if metrics is not None]
        try:
            episodes = tuple(
                _as_recorded(mixed(one, [(weight, given[member]) for weight, given in turns]))
                for member, one in enumerate(episodes)
            )
            for metrics in reported:
                episodes = tuple(with_metrics(one, own) for one, own in zip(episodes, metrics, strict=True))
        except DataError as error:
            return lost(error)
        return ScoredGroup(draw, task, episodes, total.astype(np.float32), parts, failed)

    async def _call_reward(
        self, of: WeightedReward, task: Task, episodes: Sequence[Episode]
    ) -> tuple[Floats, list[Placed | None] | None, ReportedMetrics | None]:
        """Return one reward's scores [G], and its turn rewards and metrics if it gave any. Raises DataError or DeadlineExceeded that
        names the reward, or ConfigError, which only the author of the run file can fix."""
        try:
            with timed(self._profile, f"reward.{of.name}/score", len(episodes)), contained(f"reward {of.name!r}"):
                answer = await within(of.reward(task, episodes), of.deadline_s, f"reward {of.name!r}")
                totals, turns = split_scores(answer, episodes)
                metrics = reported_metrics(answer)
                given = np.asarray(totals)
            self._blocked.pop(f"reward {of.name!r}", None)
        except DeadlineExceeded:
            raise
        except self._fatal:
            raise
        except (Exception, EventLoopBlocked) as error:
            self._count_blocked(f"reward {of.name!r}", error)
            ours = isinstance(error, AtroposError)
            place = "" if ours else file_and_line(error.__traceback__)
            raise DataError(
                f"reward {of.name!r} raised {type(error).__name__} for task {task.id!r}: {Exception.__str__(error)}{place}",
                remedy=error.remedy if isinstance(error, AtroposError) else None,
            ) from error
        if given.dtype.kind not in "biuf":  # numpy would read numbers out of text
            raise DataError(f"reward {of.name!r} gave {given.tolist()!r:.200} for task {task.id!r}: not all numbers")
        if given.shape != (len(episodes),):
            raise DataError(f"reward {of.name!r} gave shape {given.shape} for {len(episodes)} episodes")
        if not (np.abs(given.astype(np.float64)) <= LARGEST_REWARD).all():
            raise DataError(
                f"reward {of.name!r} gave {given.tolist()!r:.200} for task {task.id!r}: not all finite and at most "
                f"{LARGEST_REWARD:g}"
            )
        return np.asarray(given, np.float32), turns, metrics

    def _policy(self, key: ScheduleKey, sampling: Sampling) -> EnginePolicy:
        return EnginePolicy(
            self._engine,
            self._tokenizer,
            sampling,
            deadline_s=self._deadline_s,
            turnstile=self._turnstile,
            key=key,
        )

    def _slot(self, environment: Environment) -> AbstractAsyncContextManager[object]:
        """Return the slot for one more rollout. In a deterministic run there is no limit, since all rollouts must reach their first
        sample before any is answered."""
        return environment.slot if self._turnstile is None else nullcontext()

    def _leave(self, key: ScheduleKey) -> None:
        if self._turnstile is not None:
            self._turnstile.leave(key)


def runs_groups(environment: Environment) -> bool:
    """True if the environment runs and scores the members of a group together."""
    return type(environment).rollout_group is not Environment.rollout_group


def task_count(name: str, environment: Environment, split: Split) -> int:
    """Return how many tasks a split has. Raises DataError that names the environment, whatever its code raises."""
    try:
        with contained(f"environment {name!r}: tasks({split!r})"):
            return len(_tasks_of(name, environment, split))
    except AtroposError:
        raise
    except Exception as error:
        raise _raised(name, split, error) from error


def check_named_tasks(name: str, environment: Environment, split: Split) -> None:
    """Raises DataError if a task of the split cannot be run, or two have the same id, as far as `check_tasks` looks, and for anything
    that the environment's code raises."""
    try:
        with contained(f"environment {name!r}: tasks({split!r})"):
            check_tasks(name, _tasks_of(name, environment, split))
    except AtroposError:
        raise
    except Exception as error:
        raise _raised(name, split, error) from error


def warn_if_test_tasks_are_trained(name: str, environment: Environment) -> None:
    """Warn if the first held-out tasks are training tasks as well, by id and content. Of lazy tasks, compare as many as can be made in
    LOOK_S."""
    until = time.monotonic() + LOOK_S
    try:
        with contained("tasks()"):
            train, test = environment.tasks("train"), environment.tasks("test")
            missing = {repr(test[index]) for index in range(min(len(test), FIRST_TESTED)) if time.monotonic() < until}
            first = len(missing)
            for index in range(min(len(train), FIRST_TRAINED)):
                if not missing or time.monotonic() > until:
                    break
                missing.discard(repr(train[index]))
    except Exception:  # noqa: BLE001 - the plugin boundary: a rollout of this task reports it
        return
    if first and not missing:
        console.warn(
            f"environment {name!r}: the first {first} held-out tasks are training tasks as well, so held-out accuracy shows what was "
            "memorized. Return different tasks for tasks('test') and tasks('train')."
        )


def _tasks_of(name: str, environment: Environment, split: Split) -> Sequence[Task]:
    """Return the tasks of a split. Raises DataError if they have no length, or cannot be read by their index."""
    tasks: Any = environment.tasks(split)  # the plugin boundary: it may return anything
    if hasattr(tasks, "__len__") and hasattr(tasks, "__getitem__"):
        return cast("Sequence[Task]", tasks)
    remedy = "Return a sequence of tasks, such as a list: a run reads any of them, in any order."
    if tasks is None:
        gave = "None"
    elif inspect.iscoroutine(tasks):
        tasks.close()
        gave, remedy = (
            "a coroutine",
            "Write `def tasks(self, split)`, without `async`. What must be awaited belongs in open().",
        )
    elif inspect.isgenerator(tasks) or inspect.isasyncgen(tasks):
        gave, remedy = (
            "a generator",
            "Return a list instead of `yield`ing its tasks: a run reads any of them, in any order.",
        )
    else:
        gave = f"an object of the class {type(tasks).__name__}"
    raise DataError(f"environment {name!r}: tasks({split!r}) returned {gave}, not a sequence of tasks.", remedy=remedy)


def _raised(name: str, split: Split, error: Exception) -> DataError:
    line = line_of_component(error.__traceback__)
    return DataError(
        f"environment {name!r}: tasks({split!r}) raised {type(error).__name__}: {error}{f' ({line})' if line else ''}",
        remedy=f"Fix {'that line or what it needs' if line else 'its tasks()'}. `atropos check` tests a component without a run.",
    )


def checked_episode(episode: Episode | Failed, vocabulary: int = 0) -> Episode | Failed:
    """Return the episode with plain Python numbers. Raises DataError for anything that is not an episode, or must not be trained
    (`group_schema`). `vocabulary` 0: unknown."""
    if isinstance(episode, Failed):
        check_failed(episode)
        return episode
    if not isinstance(episode, Episode):
        raise DataError(f"rollout() must return an Episode, not {type(episode).__name__}")
    made = replace(
        episode,
        rollouts=tuple(episode.rollouts),
        score=_plain(episode.score),
        correct=_checked_correct(episode.correct),
        parts={name: _plain(value) for name, value in episode.parts.items()},
        metrics={name: _plain(value) for name, value in episode.metrics.items()},
        messages=tuple(episode.messages),
    )
    check_episode(made, vocabulary)
    return made


def _checked_correct(correct: Any) -> bool | None:
    """`correct` of an episode. 0 and 1 count too, as numpy's do; any other text or number would count as right."""
    if correct is None:
        return None
    if isinstance(correct, str) or correct not in (True, False):
        raise DataError(
            f"correct is {correct!r:.100}, not True, False or None",
            remedy="Compare something: Score(value, correct=reply == answer).",
        )
    return bool(correct)


def checked_group(group: ScoredGroup, vocabulary: int = 0) -> ScoredGroup:
    """Return the group. If it must not be trained, return one whose rollouts all failed, with the cause."""
    if not group.episodes:
        return group
    try:
        check_group(group, vocabulary)
    except DataError as error:
        return failed_group(group, error, "group")
    return group


def failed_group(group: ScoredGroup, error: BaseException, where: str) -> ScoredGroup:
    """Return a group of the same draw and task, with every rollout failed by this error."""
    failed = (*group.failed, *[failed_by(error, where)] * max(len(group.episodes), 1))
    return ScoredGroup(group.draw, group.task, (), np.zeros(0, np.float32), failed=failed)


def _as_recorded(episode: Episode) -> Episode:
    """Return the episode without the keys that only rewards read; the tokens contain the same text."""
    if not any(name in message for message in episode.messages for name in AS_SAMPLED):
        return episode
    kept = [{name: value for name, value in one.items() if name not in AS_SAMPLED} for one in episode.messages]
    return replace(episode, messages=tuple(kept))


def _plain(value: Any) -> Any:
    """Convert a number of numpy or torch, or a flag, to Python's own type. Other values stay, and are refused later by name."""
    item = getattr(value, "item", None)
    value = item() if item is not None and getattr(value, "ndim", 1) == 0 else value
    return float(value) if isinstance(value, float | bool) else value


def failed_by(error: BaseException, where: str) -> Failed:
    """Turn an exception of a rollout into data: the first line of its message, and the remedy of an AtroposError."""
    cause = f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"
    if not isinstance(error, AtroposError):
        return Failed(cause, where, "".join(traceback.format_exception(error)))
    return Failed(f"{cause} {' '.join(error.remedy.split())}" if error.remedy else cause, where)

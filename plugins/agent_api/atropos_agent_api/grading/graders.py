"""The three ways to score an agent's episode: a function, an installed reward, or the environment of its tasks."""

from __future__ import annotations

import asyncio
import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from atropos_agent_api.forks import ForkedFunction
from atropos_agent_api.grading.case import Case, read_score
from atropos_core.errors import ConfigError
from atropos_core.guards.deadlines import within
from atropos_core.guards.open_component import opened
from atropos_core.interfaces import Environment, Reward
from atropos_core.processes.reward_metrics import reported_metrics
from atropos_core.training.parts import Closable
from atropos_core.turn_rewards import split_scores
from atropos_core.types import Episode, Score


class Grader(ABC):
    """Scores a case. `reads_files`: it reads the files that the program left."""

    reads_files = False

    async def open(self) -> None:
        """Called once, before any program runs."""

    @abstractmethod
    async def score(self, case: Case, episode: Episode) -> Score:
        """`episode` has no score yet. Raises DataError, DeadlineExceeded, RemoteError, or what a reward raises."""

    async def close(self) -> None:
        """May be called twice."""


class FunctionGrader(Grader):
    """A function of a Case, imported before any program runs, and called in a fork of that process each time."""

    reads_files = True

    def __init__(self, reference: str, log: Path, deadline_s: float) -> None:
        self._reference = reference
        self._function = ForkedFunction(reference, f"{__name__}:of_record", log, "grader")
        self._deadline_s = deadline_s

    async def open(self) -> None:
        await self._function.open()

    async def score(self, case: Case, episode: Episode) -> Score:
        return read_score(await self._function.call(case.record(), self._deadline_s), self._reference)

    async def close(self) -> None:
        await self._function.close()


def of_record(function: Callable[[Case], Any]) -> Callable[[Mapping[str, Any]], dict[str, Any]]:
    """The same function, with the case and the score as JSON values."""

    def grade(record: Mapping[str, Any]) -> dict[str, Any]:
        given = function(Case.of_record(record))
        if inspect.iscoroutine(given):
            given = asyncio.run(given)
        score = read_score(given, getattr(function, "__qualname__", "the reward"))
        return {
            "score": score.value,
            "correct": score.correct,
            "parts": score.parts,
            "metrics": score.metrics,
            "turns": score.turns,
        }

    return grade


class PluginGrader(Grader):
    """Any installed reward. It reads the conversation, whose last message is the answer."""

    def __init__(self, reward: Reward, name: str, deadline_s: float) -> None:
        self._reward = reward
        self._name = name
        self._deadline_s = deadline_s

    async def open(self) -> None:
        await opened(f"reward {self._name!r}", self._reward)

    async def score(self, case: Case, episode: Episode) -> Score:
        given = await within(self._reward(case.task, [episode]), self._deadline_s, f"reward {self._name!r}")
        # turn rewards are placed later, by calls: here the episode's turns are not known
        totals, _ = split_scores(_without_turns(given), [episode])
        values = np.asarray(totals)
        if values.shape != (1,):
            raise ConfigError(f"reward {self._name!r} gave shape {values.shape} for one episode.")
        score = read_score(values[0], f"reward {self._name!r}")
        [own] = given
        if not isinstance(own, Score):
            return score
        [metrics] = reported_metrics(given) or [{}]
        return replace(score, turns=own.turns, metrics={**score.metrics, **metrics})

    async def close(self) -> None:
        if isinstance(self._reward, Closable):
            await self._reward.close()


def _without_turns(given: Any) -> Any:
    return (
        [replace(one, turns=None) if isinstance(one, Score) else one for one in given]
        if isinstance(given, list)
        else given
    )


class EnvironmentGrader(Grader):
    """The environment of the tasks scores the reply."""

    def __init__(self, environment: Environment, name: str) -> None:
        if type(environment).score is Environment.score:
            raise ConfigError(
                f"environment {name!r} cannot score a reply with score(): it scores its tasks by what it runs itself.",
                remedy='Name a reward: [environment.NAME.reward] function = "grade.py:grade"',
            )
        self._environment = environment
        self._name = name

    async def score(self, case: Case, episode: Episode) -> Score:
        given = await self._environment.score(case.task, {"role": "assistant", "content": case.answer})
        return read_score(given, f"environment {self._name!r}")

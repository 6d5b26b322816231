"""Annotate groups with logprobs of the policy after it has been shown their results."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from time import perf_counter

import numpy as np

from atropos_core.errors import ConfigError, FitError
from atropos_core.guards.deadlines import within
from atropos_core.interfaces import Teacher
from atropos_core.models.model_size import read
from atropos_core.plugins.provider import RunContext
from atropos_core.rollouts.tokenizer import ChatTokenizer
from atropos_core.storage.checkpoint import Checkpoints, taking_up
from atropos_core.types import Metrics, ScoredGroup, TopK
from atropos_distillation.config import SelfOptions
from atropos_distillation.lessons import lessons_of
from atropos_distillation.scoring_engine import ScoringEngine
from atropos_distillation.teacher import annotated


class SelfTeacher(Teacher):
    """A teacher on its own engine, which begins with the run's model and loads the policy from the run's checkpoints."""

    def __init__(self, options: SelfOptions, inside: RunContext, top_k: int) -> None:
        self._options = options
        self._inside = inside  # what the engine is built with
        self._label = inside.label
        self._checkpoints = Checkpoints(inside.directory / "checkpoints")
        self._tokenizer = ChatTokenizer(inside.model, inside.today)
        self._top_k = top_k
        self._engine = ScoringEngine(options.resolved_engine(), inside)
        model = read(inside.model)
        self._positions = model.longest if model else 1 << 30
        self._version = 0  # of the weights that the engine has
        self._metrics: Metrics = {}

    async def open(self) -> None:
        """Raises what starting the engine or loading the model raises."""
        await self._engine.open()

    async def annotate(self, groups: Sequence[ScoredGroup]) -> Sequence[ScoredGroup]:
        """Raises DeadlineExceeded, ConfigError if the run's checkpoints are too far apart, FitError for sequences that the engine
        cannot score, and the engine's own errors."""
        return await within(self._annotate(groups), self._options.deadline_s, f"{self._label}: {len(groups)} groups")

    def metrics(self) -> Metrics:
        return self._metrics

    async def close(self) -> None:
        await self._engine.close()

    async def _annotate(self, groups: Sequence[ScoredGroup]) -> Sequence[ScoredGroup]:
        start = perf_counter()
        rollouts = [one for each in groups for episode in each.episodes for one in episode.rollouts]
        newest = max((int(one.policy_version[one.sampled].max(initial=0)) for one in rollouts), default=0)
        behind = await self._catch_up(newest)
        made = [await self._taught(one) for one in groups]
        await self._engine.release_cache()
        counted = {"rollouts": sum(count for _, count, _ in made), "left_out": sum(left_out for *_, left_out in made)}
        self._metrics = {**counted, "versions_behind": float(behind), "seconds": perf_counter() - start}
        taught = [group for group, *_ in made]
        return taught if counted["rollouts"] else _with_silence(taught)

    async def _catch_up(self, wanted: int) -> int:
        """Load the newest policy that is not newer than `wanted`, unless the present one is near enough. Returns how far it is behind."""
        if not 0 <= wanted - self._version <= self._options.versions_behind:
            version, directory = await asyncio.to_thread(self._policy_of, wanted)
            if wanted - version > self._options.versions_behind:
                raise ConfigError(
                    f"{self._label} teaches rollouts of version {wanted}, and the newest policy saved is of version {version}.",
                    remedy=f"--set checkpoint.every=1, or more of {self._label}.versions_behind.",
                )
            await self._engine.load(directory, version)
            self._version = version
        return wanted - self._version

    def _policy_of(self, wanted: int) -> tuple[int, Path]:
        for step in reversed(self._checkpoints.steps()):
            checkpoint = self._checkpoints.at(step)
            with taking_up(f"the state in {checkpoint.directory}"):
                version = int(checkpoint.state["progress"]["version"])
            if version <= wanted:
                return version, checkpoint.policy
        return 0, self._inside.model

    async def _taught(self, group: ScoredGroup) -> tuple[ScoredGroup, int, int]:
        """Score each rollout at the temperature at which it was sampled. Also returns how many were taught, and how many left out."""
        lessons, left_out = lessons_of(group, self._options, self._tokenizer, self._positions)
        taught: dict[int, TopK] = {}
        for temperature in {one.rollout.temperature for one in lessons}:
            some = [one for one in lessons if one.rollout.temperature == temperature]
            tokens = [one.tokens for one in some]
            try:
                scored = await self._engine.score(tokens, self._top_k, temperature or 1.0)
            except NotImplementedError as error:
                raise FitError(
                    f"the engine of {self._label} cannot score what it is shown: {error}",
                    remedy=f"Set {self._label}.engine.use=hf, or sampling.temperature=1 and a context that holds two replies.",
                ) from error
            taught |= {id(one.rollout): one.of_rollout(said) for one, said in zip(some, scored, strict=True)}
        return annotated(group, taught), len(lessons), left_out


def _with_silence(groups: Sequence[ScoredGroup]) -> list[ScoredGroup]:
    """If no rollout could be taught, give one rollout an empty annotation. Without it, the trainer would take the groups for those of a
    run without a teacher."""
    done = False
    made: list[ScoredGroup] = []
    for group in groups:
        at = next((i for i, one in enumerate(group.episodes) if one.rollouts and one.rollouts[0].teacher is None), None)
        if not done and at is not None:
            first, *others = group.episodes[at].rollouts
            silent = TopK(np.zeros(len(first.tokens) + 1, np.int64), np.zeros(0, np.int32), np.zeros(0, np.float32))
            episode = replace(group.episodes[at], rollouts=(replace(first, teacher=silent), *others))
            group, done = replace(group, episodes=(*group.episodes[:at], episode, *group.episodes[at + 1 :])), True
        made.append(group)
    return made

"""Groups in, the same groups with a teacher's logprobs out."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from time import perf_counter
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from atropos_core.errors import FitError
from atropos_core.guards.deadlines import within
from atropos_core.interfaces import Teacher
from atropos_core.types import Bools, Metrics, Rollout, ScoredGroup, Tokens, TopK, offsets_of
from atropos_distillation.config import TeacherOptions


class LogprobSource(Protocol):
    """The source of a teacher's logprobs. `remedy`: what to use instead if it cannot score what it is given."""

    remedy: str

    async def open(self) -> None: ...
    async def score(self, sequences: Sequence[Tokens], k: int, temperature: float) -> list[TopK]:
        """Return T entries for a sequence of T tokens: the k likeliest tokens of the distribution that predicts token t, or
        with k = 0 token t itself. Entry 0 is empty: nothing predicts it. Raises NotImplementedError if it cannot score this."""
        ...

    async def release_cache(self) -> None:
        """Called when nothing is scored for a while: free memory that only scoring needs."""
        ...

    async def close(self) -> None: ...


class TokenTeacher(Teacher):
    """Annotates every token that the loss counts, in groups of the environments that it is for. Annotations of a rollout's
    own environment, or of an earlier teacher, stay."""

    def __init__(self, options: TeacherOptions, source: LogprobSource, top_k: int, label: str) -> None:
        self._options = options
        self._source = source
        self._top_k = top_k
        self._label = label
        self._metrics: Metrics = {}

    async def open(self) -> None:
        await self._source.open()

    async def annotate(self, groups: Sequence[ScoredGroup]) -> Sequence[ScoredGroup]:
        """Raises DeadlineExceeded, FitError if the teacher's engine cannot score a rollout, and the engine's own errors:
        a group is never trained without the teacher that the run names."""
        start = perf_counter()
        wanted = [rollout for group in groups if self._is_for(group) for rollout in _untaught(group)]
        scoring = self._score(wanted)
        made = await within(scoring, self._options.deadline_s, f"{self._label}: {len(wanted)} rollouts")
        await self._source.release_cache()
        taught = {id(rollout): teacher for rollout, teacher in zip(wanted, made, strict=True)}
        self._count(made, perf_counter() - start)
        return [annotated(group, taught) for group in groups]

    def metrics(self) -> Metrics:
        return self._metrics

    async def close(self) -> None:
        await self._source.close()

    def _is_for(self, group: ScoredGroup) -> bool:
        return not self._options.environments or group.draw.environment in self._options.environments

    async def _score(self, rollouts: Sequence[Rollout]) -> list[TopK]:
        """Scored at the temperature at which each was sampled, up to the last token that the loss counts."""
        by_temperature: dict[float, list[int]] = defaultdict(list)
        for index, rollout in enumerate(rollouts):
            by_temperature[rollout.temperature or 1.0].append(index)
        made: dict[int, TopK] = {}
        for temperature, indices in by_temperature.items():
            indices.sort(key=lambda index: len(rollouts[index].tokens))  # similar lengths are padded together
            for first in range(0, len(indices), self._options.sequences_at_once):
                some = indices[first : first + self._options.sequences_at_once]
                sequences = [rollouts[index].tokens[: _end(rollouts[index].trained)] for index in some]
                try:
                    scored = await self._source.score(sequences, self._top_k, temperature)
                except NotImplementedError as error:
                    raise FitError(
                        f"{self._label} cannot score these rollouts: {error}",
                        remedy=f"{self._source.remedy.format(label=self._label)}, or set sampling.temperature = 1.",
                    ) from error
                for index, one in zip(some, scored, strict=True):
                    made[index] = at_trained(one, rollouts[index].trained)
        return [made[index] for index in range(len(rollouts))]

    def _count(self, made: Sequence[TopK], seconds: float) -> None:
        positions = sum(int((np.diff(one.offsets) > 0).sum()) for one in made)
        mass = sum(float(np.exp(one.logprobs.astype(np.float64)).sum()) for one in made)
        self._metrics = {
            "rollouts": float(len(made)),
            "positions": float(positions),
            "coverage": mass / positions if positions else 0.0,
            "seconds": seconds,
        }


def at_trained(scored: TopK, trained: Bools) -> TopK:
    """Extend `scored`, which covers the first tokens of `trained` [T], to T entries, and keep only those that the loss counts."""
    counts = np.zeros(len(trained), np.int64)
    counts[: len(scored.offsets) - 1] = np.diff(scored.offsets)
    owner = np.repeat(np.arange(len(trained)), counts)
    keep = trained[owner]
    counts[~trained] = 0
    return TopK(offsets_of(counts), scored.token_ids[keep], scored.logprobs[keep])


def _end(trained: Bools) -> int:
    positions_trained: NDArray[np.intp] = np.flatnonzero(trained)
    return int(positions_trained[-1]) + 1


def _untaught(group: ScoredGroup) -> Iterator[Rollout]:
    for episode in group.episodes:
        for rollout in episode.rollouts:
            if rollout.teacher is None and rollout.trained.any():
                yield rollout


def annotated(group: ScoredGroup, taught: Mapping[int, TopK]) -> ScoredGroup:
    """Return the group with these annotations, by the `id` of their rollouts."""
    episodes = tuple(
        replace(
            episode,
            rollouts=tuple(
                replace(one, teacher=taught[id(one)]) if id(one) in taught else one for one in episode.rollouts
            ),
        )
        for episode in group.episodes
    )
    return replace(group, episodes=episodes)

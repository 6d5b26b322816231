"""Where the loop's groups come from. Here: from plays in this process. Over HTTP: `atropos_core.api_source`."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from atropos_core.config import RunConfig
from atropos_core.hub import Entry, Hub, Limits, Want
from atropos_core.interfaces import Curriculum, Outcome, TaskSource
from atropos_core.producer import Producer
from atropos_core.rollouts import Player, task_count
from atropos_core.types import ScoredGroup


@dataclass(frozen=True)
class Lease:
    """One group, handed out to the trainer alone. A `group.draw.id` below 0 means that no curriculum drew it: there is
    nothing to settle."""

    id: int
    group: ScoredGroup


@dataclass
class News:
    """What became of draws that no lease hands out."""

    failed: list[ScoredGroup] = field(default_factory=list)
    dropped: dict[str, int] = field(default_factory=dict)  # cause -> groups


class Source(ABC):
    """Raw scored groups for one trainer. Settles the draws of groups that fail or grow stale; the loop settles the rest."""

    broken: asyncio.Future[None]  # raises what ended it

    def __init__(self, curriculum: Curriculum) -> None:
        self.curriculum = curriculum
        self._news = News()

    @property
    def commit_due(self) -> bool:
        """Whether trained groups that no checkpoint holds take up so much room that one should be saved."""
        return False

    @abstractmethod
    async def open(self, state: Mapping[str, Any] | None) -> None:
        """Open the curriculum. `state` is what `state()` said in the checkpoint that the run resumes from."""

    @abstractmethod
    def want(self, groups: int) -> None:
        """See to it that `groups` groups wait or are being played."""

    @abstractmethod
    async def lease(self, n: int, version: int, deadline_s: float) -> list[Lease]:
        """`n` groups, none with a token more than `max_staleness` versions behind `version`. Raises DeadlineExceeded."""

    @abstractmethod
    async def trained(self, leases: Sequence[Lease]) -> None:
        """The groups were trained or deliberately dropped: the update is in the trainer's memory."""

    @abstractmethod
    def state(self) -> Mapping[str, Any]:
        """To be saved in the checkpoint that `commit` follows."""

    @abstractmethod
    async def commit(self) -> None:
        """Everything trained so far is inside a durable checkpoint."""

    async def add_engine(self, url: str) -> None:
        """Workers elsewhere may sample from the engine behind this URL."""

    async def publish(self, version: int) -> None:
        """The engines sample from this version now."""

    @abstractmethod
    async def stop(self) -> None:
        """Nothing is played any more. What was being played stays unsettled."""

    async def close(self) -> None:
        """Let go of everything; may be called twice."""

    def news(self) -> News:
        """What happened since the last call."""
        news, self._news = self._news, News()
        return news

    def _failed(self, group: ScoredGroup) -> None:
        self._news.failed.append(group)

    def _dropped(self, cause: str) -> Outcome:
        self._news.dropped[cause] = self._news.dropped.get(cause, 0) + 1
        return "stale" if cause == "stale" else "dropped"


class LocalSource(Source):
    """Plays in this process, into a hub in this process. What is not committed when the run dies was never trained, as
    far as its resumed self knows, and its draws are played again."""

    def __init__(self, config: RunConfig, player: Player, curriculum: Curriculum) -> None:
        super().__init__(curriculum)
        training = config.training
        self._weights = {name: environment.weight for name, environment in config.environment.items()}
        self._player = player
        self._hub: Hub[ScoredGroup] = Hub(
            Limits(int(config.hub.size_mb * 1e6)),
            max_staleness=training.max_staleness,
            on_dropped=self._dropped_here,
            keep_trained=False,
        )
        self._session = self._hub.open("run")
        self._producer = Producer(
            player,
            curriculum,
            self._hub,
            group_size=training.group_size,
            min_group=training.min_group,
            sampling=config.sampling.record(),
            on_failed=self._failed,
        )
        self.broken = self._producer.broken

    async def open(self, state: Mapping[str, Any] | None) -> None:
        if state:
            self._hub.load(state)
        environments = self._player.environments
        self.curriculum.open(
            {name: TaskSource(task_count(name, e, "train"), self._weights[name]) for name, e in environments.items()}
        )

    def want(self, groups: int) -> None:
        self._producer.want(groups)

    async def lease(self, n: int, version: int, deadline_s: float) -> list[Lease]:
        entries = await self._session.lease(Want(groups=n), version, deadline_s)
        return [Lease(entry.id, entry.payload) for entry in entries]

    async def trained(self, leases: Sequence[Lease]) -> None:
        self._session.trained([lease.id for lease in leases])

    def state(self) -> Mapping[str, Any]:
        return self._hub.state()

    async def commit(self) -> None:
        self._session.commit()

    async def stop(self) -> None:
        await self._producer.stop()

    async def close(self) -> None:
        await self._hub.close()

    def _dropped_here(self, entry: Entry[ScoredGroup], cause: str) -> None:
        group = entry.payload
        self.curriculum.settle(group.draw, self._dropped(cause), group)

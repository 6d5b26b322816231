"""The source of the loop's groups, which also settles their draws. Here it runs rollouts in this process; a plugin offers a source of
groups from remote workers (hook `atropos_sources`)."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from atropos_core import console
from atropos_core.config.run_file import RunConfig
from atropos_core.errors import CheckpointError, DeadlineExceeded, NoProgress
from atropos_core.guards.open_component import in_one_line
from atropos_core.hub.hub import Hub
from atropos_core.hub.records import BatchSize, GroupRecord, Limits
from atropos_core.interfaces import Curriculum, Environment, Outcome, TaskSource
from atropos_core.rollouts.producer import PATIENCE, Producer
from atropos_core.rollouts.runner import RolloutRunner, task_count
from atropos_core.rollouts.task_digests import changes, digests_of
from atropos_core.storage.checkpoint import taking_up
from atropos_core.types import Draw, ScoredGroup

MOST_DROPPED = 32  # untrained groups per step that are kept for its record


@dataclass(frozen=True)
class LeasedGroup:
    """One group, leased only to this trainer. If `group.draw.id` is below 0, no curriculum drew it, and there is nothing to
    settle."""

    id: int
    group: ScoredGroup
    waited_s: float | None = None  # in the queue, after it was scored; None if unknown


@dataclass
class LostGroups:
    """Draws that ended without a lease."""

    failed: list[ScoredGroup] = field(default_factory=list)
    dropped: dict[str, int] = field(default_factory=dict)  # cause -> groups
    dropped_groups: list[tuple[ScoredGroup, str]] = field(
        default_factory=list
    )  # the first few of them, with their cause


class Source(ABC):
    """Scored groups for one trainer. It settles each draw with the curriculum: failed and stale groups when they are reported, leased
    ones when the loop reports their outcome."""

    broken: asyncio.Future[None]  # raises what ended it

    def __init__(self, curriculum: Curriculum) -> None:
        self.curriculum = curriculum
        self._lost = LostGroups()
        self._ended: list[tuple[Draw, Outcome, ScoredGroup | None]] = []  # not reported yet, so not settled

    @property
    def commit_due(self) -> bool:
        """True if trained groups without a checkpoint take up so much room that one should be saved."""
        return False

    @abstractmethod
    async def open(self, state: Mapping[str, Any] | None) -> None:
        """Open the curriculum. `state` is what `state()` returned for the checkpoint that the run resumes from."""

    @abstractmethod
    def request(self, groups: int) -> None:
        """Make sure that `groups` groups wait or are being run."""

    @abstractmethod
    async def lease(self, n: int, version: int, deadline_s: float) -> list[LeasedGroup]:
        """Return `n` groups, none with a token more than `max_staleness` versions behind `version`. Raises DeadlineExceeded."""

    async def settle(self, outcomes: Sequence[tuple[LeasedGroup, Outcome]]) -> None:
        """Report the outcome of leased groups: trained, if the update is in the trainer's memory, or deliberately dropped."""
        for lease, outcome in outcomes:
            if lease.group.draw.id >= 0:
                self._settle(lease.group.draw, outcome, lease.group)
        await self._mark_trained([lease.id for lease, _ in outcomes])

    @abstractmethod
    async def _mark_trained(self, ids: Sequence[int]) -> None:
        """Mark leased groups as settled, by their ids. `commit` follows once a checkpoint holds the update."""

    @abstractmethod
    def state(self) -> Mapping[str, Any]:
        """Return the state for the checkpoint that `commit` follows."""

    @abstractmethod
    async def commit(self) -> None:
        """Record that everything trained so far is in a durable checkpoint."""

    async def add_engine(self, url: str) -> None:
        """Let remote workers sample from the engine behind this URL."""

    async def publish(self, version: int) -> None:
        """Record that the engines now sample from this version."""

    @abstractmethod
    async def stop(self) -> None:
        """Stop all rollouts. Unfinished ones stay unsettled."""

    async def close(self) -> None:
        """Release everything; may be called twice."""

    def take_lost(self) -> LostGroups:
        """Return what was lost since the last call, and settle its draws, in their order. Call it with the step that records it: if the
        run dies before that step is saved, these draws are drawn again and nothing is missing."""
        lost, self._lost = self._lost, LostGroups()
        ended, self._ended = sorted(self._ended, key=lambda one: one[0].id), []
        for draw, outcome, group in ended:
            self._settle(draw, outcome, group)
        return lost

    def _settle(self, draw: Draw, outcome: Outcome, group: ScoredGroup | None) -> None:
        self.curriculum.settle(draw, outcome, group)

    def _failed(self, group: ScoredGroup, draw: Draw | None) -> None:
        """Record a failed group. `draw` is None if no curriculum waits for it."""
        self._lost.failed.append(group)
        if draw is not None:
            self._ended.append((draw, "failed", group))

    def _dropped(self, cause: str, draw: Draw | None, group: ScoredGroup | None = None) -> None:
        self._lost.dropped[cause] = self._lost.dropped.get(cause, 0) + 1
        if group is not None and len(self._lost.dropped_groups) < MOST_DROPPED:
            self._lost.dropped_groups.append((group, cause))
        if draw is not None:
            self._ended.append((draw, "stale" if cause == "stale" else "dropped", group))


async def refuse_other_tasks(
    environments: Mapping[str, Environment], state: Mapping[str, Any], *, allowed: bool
) -> None:
    """Raises CheckpointError if the training tasks differ from those that `state` of a LocalSource was saved with. `allowed`: warn."""
    with taking_up("what the checkpoint says of tasks"):
        known = {
            name: had for name, had in state.get("digests", {}).items() if name in environments and had is not None
        }
    for name, had in known.items():
        with taking_up(f"what the checkpoint says of the tasks of environment {name!r}"):
            found = await changes(had, environments[name].tasks("train"))
        if found:
            say_other_tasks(
                f"the training tasks of environment {name!r} have changed since the checkpoint: {found}.",
                allowed=allowed,
            )


def size_warning(name: str, has: int, had: int) -> str:
    return (
        f"environment {name!r} has {has:,} training tasks, and had {had:,} when the checkpoint was saved: "
        "epochs have another length from here on, and a task's number may mean another task."
    )


def say_other_tasks(fact: str, *, allowed: bool) -> None:
    """Raise CheckpointError, or only warn if `allowed`."""
    if not allowed:
        raise CheckpointError(
            f"{fact} The curriculum knows tasks by their numbers, so that it would take one task for another.",
            remedy="Bring the old tasks back, begin a new run, or resume all the same: --set checkpoint.other_tasks=true",
        )
    console.warn(f"{fact} What the curriculum knows of a number is of the old task.")


class LocalSource(Source):
    """Rollouts in this process, into a hub in this process. If the run dies, groups that were not committed count as never trained
    after the resume, and their draws are run again."""

    def __init__(self, config: RunConfig, runner: RolloutRunner, curriculum: Curriculum) -> None:
        super().__init__(curriculum)
        training = config.training
        self._weights = {name: environment.weight for name, environment in config.environment.items()}
        self._runner = runner
        self._sizes: dict[str, int] = {}  # training tasks, by environment
        self._digests: dict[str, dict[str, Any] | None] = {}  # of the same; None: they are made as they are read
        self._wanted = 0
        self._version = 0  # that was leased for last
        self._stale_in_a_row = 0  # since then: what is sampled for a lease is not stale for it, so only leftovers are
        self._hub: Hub[ScoredGroup] = Hub(
            Limits(int(config.hub.size_mb * 1e6)),
            max_staleness=training.max_staleness,
            on_dropped=self._dropped_here,
            keep_trained=False,
        )
        self._session = self._hub.open("run")
        self._producer = Producer(
            runner,
            curriculum,
            self._hub,
            group_size=training.group_size,
            min_group=training.min_group,
            sampling=config.sampling.record(),
            on_failed=lambda group: self._failed(group, group.draw),
        )
        self.broken = self._producer.broken

    async def open(self, state: Mapping[str, Any] | None) -> None:
        self._sizes = {name: task_count(name, e, "train") for name, e in self._runner.environments.items()}
        for name, environment in self._runner.environments.items():
            self._digests[name] = await digests_of(environment.tasks("train"))
        with taking_up("what the checkpoint says of the hub and of tasks"):
            if state:
                self._hub.load(state)
            for name, had in (state or {}).get("tasks", {}).items():
                if (has := self._sizes.get(name, had)) != had:
                    console.warn(size_warning(name, has, had))
        environments = self._runner.environments
        sources = {
            name: TaskSource(size, self._weights[name], environments[name].tasks("train"))
            for name, size in self._sizes.items()
        }
        if not sources:  # the run has only a warm start
            return
        with in_one_line("the curriculum could not open"):
            self.curriculum.open(sources)

    def request(self, groups: int) -> None:
        self._wanted = groups
        self._producer.request(groups)

    async def lease(self, n: int, version: int, deadline_s: float) -> list[LeasedGroup]:
        self._stale_in_a_row, self._version = 0, version
        batch = None
        while batch is None:
            admitted = self._runner.admitted
            try:
                batch = await self._session.lease(BatchSize(groups=n), version, deadline_s)
            except DeadlineExceeded:
                if not self._runner.waiting_for_slot and admitted == self._runner.admitted:
                    raise  # else there are some that were let in late, or wait for others to end, which have deadlines
        return [LeasedGroup(record.id, record.payload, record.waited_s) for record in batch]

    async def _mark_trained(self, ids: Sequence[int]) -> None:
        self._session.trained(ids)

    def state(self) -> Mapping[str, Any]:
        return {**self._hub.state(), "tasks": self._sizes, "digests": self._digests}

    async def commit(self) -> None:
        self._session.commit()

    async def stop(self) -> None:
        await self._producer.stop()

    async def close(self) -> None:
        self._hub.stop()

    def _dropped_here(self, record: GroupRecord[ScoredGroup], cause: str) -> None:
        """Called by the hub when a lease drops a group; that lease still waits for the full number."""
        group = record.payload
        self._dropped(cause, group.draw, group)
        self._stale_in_a_row += 1
        if self._stale_in_a_row < PATIENCE * self._wanted:
            self._producer.replace()
        elif not self.broken.done():
            self.broken.set_exception(
                NoProgress(
                    f"the last {self._stale_in_a_row} groups were all too old to train: sampled from version "
                    f"{record.label.oldest_version}, and the trainer is at {self._version}.",
                    remedy="The engines fall behind the trainer: raise training.max_staleness, or have the bridge publish "
                    "more often.",
                )
            )

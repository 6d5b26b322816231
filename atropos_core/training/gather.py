"""Gather the groups of a step: lease them, annotate and transform them, and refill the batch if transforms leave some out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from atropos_core import console
from atropos_core.advantages import is_flat
from atropos_core.config.run_file import TrainingSection
from atropos_core.errors import NoSuchVersion, PluginError
from atropos_core.group_schema import LARGEST_REWARD
from atropos_core.guards.open_component import in_one_line
from atropos_core.health.alignment import owner
from atropos_core.health.watch import Health
from atropos_core.interfaces import Outcome, SettledGroup
from atropos_core.rollouts.policy_versions import check_versions
from atropos_core.rollouts.producer import PATIENCE
from atropos_core.rollouts.source import LeasedGroup, Source
from atropos_core.training.parts import Parts
from atropos_core.types import Metrics, ScoredGroup, offsets_of


@dataclass
class GatheredGroups:
    """The groups that a step trains, and what happened to other draws since the last step."""

    version: int  # the newest that these were sampled from
    leased: list[LeasedGroup] = field(default_factory=list)
    kept: list[ScoredGroup] = field(default_factory=list)  # with advantages: those that the transforms kept
    refused: list[LeasedGroup] = field(default_factory=list)  # with versions that never existed
    failed: Sequence[ScoredGroup] = ()
    dropped: Mapping[str, int] = field(default_factory=dict)  # by cause, before they were leased
    dropped_groups: Sequence[tuple[ScoredGroup, str]] = ()  # some of these, with their cause
    dropped_by: dict[int, str] = field(
        default_factory=dict
    )  # draw id -> the transform, or gold reward, that left it out
    held_back: set[int] = field(default_factory=set)  # draw ids of tasks that the gold reward holds back

    @property
    def raw(self) -> list[ScoredGroup]:
        """Return the groups as they were leased."""
        return [leased.group for leased in self.leased]

    def outcomes(self) -> list[tuple[LeasedGroup, Outcome]]:
        """Return the outcome of each group that was leased."""
        kept = {group.draw.id for group in self.kept}
        found = [(leased, self._outcome(leased.group, kept)) for leased in self.leased]
        return [*found, *((leased, "dropped") for leased in self.refused)]

    def counts(self) -> Metrics:
        """Return how many groups were trained, and how many were not, by cause."""
        kept = {group.draw.id for group in self.kept}
        asked = [group for group in self.raw if group.draw.id not in self.held_back]
        lost = Counter(outcome for group in asked if (outcome := self._outcome(group, kept)) != "trained")
        by_cause = dict.fromkeys(("stale", "flat", "dropped"), 0) | lost + Counter(self.dropped)
        counts = {"trained": len(self.kept), "failed": len(self.failed), **by_cause}
        if self.held_back:
            counts["held_back"] = len(self.held_back)
        if self.refused:
            counts["no_such_version"] = len(self.refused)
        return {f"groups/{name}": float(count) for name, count in counts.items()}

    def settled(self) -> tuple[list[ScoredGroup], list[SettledGroup]]:
        """Return the groups that were leased or failed, and the outcome of each, and of those that were dropped before."""
        starts = offsets_of([sum(len(one.tokens) for e in group.episodes for one in e.rollouts) for group in self.kept])
        trained = {group.draw.id: (group, int(at)) for group, at in zip(self.kept, starts[:-1], strict=True)}
        found = []
        for group in self.raw:
            if group.draw.id in trained:
                kept, at = trained[group.draw.id]
                changed = len(kept.rewards) == len(group.rewards) and (kept.rewards != group.rewards).any()
                scored = group.rewards if changed else None
                found.append(SettledGroup(kept, "trained", batch_start=at, scored=scored))
            else:
                found.append(SettledGroup(group, self._outcome(group, ()), self.dropped_by.get(group.draw.id, "")))
        found += [SettledGroup(group, "failed", "training.min_group") for group in self.failed]
        leased_or_failed = [one.group for one in found]
        found += [SettledGroup(leased.group, "dropped", "no_such_version") for leased in self.refused]
        for group, cause in self.dropped_groups:
            stale = cause == "stale"
            found.append(
                SettledGroup(group, "stale" if stale else "dropped", "training.max_staleness" if stale else cause)
            )
        return leased_or_failed, found

    def _outcome(self, group: ScoredGroup, kept: Collection[int]) -> Outcome:
        flat = is_flat(group.rewards) and group.draw.id not in self.held_back
        return "trained" if group.draw.id in kept else "flat" if flat else "dropped"

    def worst_sequences(self, metrics: Metrics) -> dict[str, str]:
        """Remove the worst sequences of the batch from `metrics`. Return the owner of each, by the limit that it exceeds."""
        bounds = ("alignment/worst_fresh", "alignment/worst_stale", "alignment/worst_truncated")
        return {of: owner(self.kept, int(metrics.pop(of))) for of in bounds if of in metrics}


class GroupGatherer:
    """`unless_stopped` awaits a lease, unless the run stops first."""

    def __init__(
        self,
        training: TrainingSection,
        parts: Parts,
        source: Source,
        health: Health,
        unless_stopped: Callable[[Awaitable[list[LeasedGroup]]], Awaitable[list[LeasedGroup]]],
    ) -> None:
        self._training = training
        self._parts = parts
        self._source = source
        self._health = health
        self._profile = parts.profile
        self._warned = False
        self._gold = next((of for of in parts.rewards if of.gold is not None), None)
        self._unless_stopped = unless_stopped

    async def gather(self, step: int, version: int) -> GatheredGroups:
        """Return the groups of a step, of policy `version` at most. A batch that transforms leave too small is refilled, at most
        `training.refill_rounds` times."""
        training = self._training
        gathered = GatheredGroups(version)
        for _ in range(1 + training.refill_rounds):
            missing = training.groups_per_step - len(gathered.kept)
            if missing <= 0:
                break
            new: list[LeasedGroup] = []
            while len(new) < missing:
                new += await self._lease(step, missing - len(new), version, gathered.refused)
            new.sort(key=lambda leased: leased.group.draw.id)
            gathered.leased += new
            asked = self._trainable([leased.group for leased in new], gathered)
            gathered.kept += await self._transform(asked, gathered.dropped_by)
        lost = self._source.take_lost()
        gathered.failed, gathered.dropped, gathered.dropped_groups = lost.failed, lost.dropped, lost.dropped_groups
        return gathered

    def _trainable(self, groups: Sequence[ScoredGroup], gathered: GatheredGroups) -> list[ScoredGroup]:
        """Return the groups that may be trained. Others are of tasks that the gold reward holds back; the batch is smaller by them."""
        if self._gold is None or self._gold.gold is None:
            return list(groups)
        found = []
        for group in groups:
            if self._gold.gold.holds_back(group.draw, group.task):
                gathered.held_back.add(group.draw.id)
                self._warn_if_unscored(group)
                gathered.dropped_by[group.draw.id] = f"reward.{self._gold.name}.gold"
            else:
                found.append(group)
        return found

    def _warn_if_unscored(self, group: ScoredGroup) -> None:
        """Warn, once, of a task that was held back and has no gold reward: a worker elsewhere scored it without one."""
        assert self._gold is not None
        if group.episodes and self._gold.name not in group.parts and not self._warned:
            self._warned = True
            console.warn(
                f"task {group.task.id!r:.100} is held back for the gold reward {self._gold.name!r}, and has no such score. The worker that "
                f"ran it needs the same [reward.{self._gold.name}.gold] in its run file."
            )

    async def _lease(self, step: int, n: int, version: int, refused: list[LeasedGroup]) -> list[LeasedGroup]:
        """Return `n` groups. Groups with versions that never existed are added to `refused`. Engines publish before a step ends, so
        `version` is the newest that a group leased for it can have."""
        training, found = self._training, []
        self._source.request(n + training.max_staleness * training.groups_per_step)
        leasing = self._source.lease(n, version, 2 * training.rollout_deadline_s + 60)
        ended = partial(self._profile.ended, "sample", "rollout", "score")
        with self._profile.span("waiting", n), self._health.waiting(step, ended):
            new = await self._unless_stopped(leasing)
        for leased in new:
            try:
                check_versions(leased.group, version)
                found.append(leased)
            except NoSuchVersion as error:
                refused.append(leased)
                if len(refused) >= PATIENCE * training.groups_per_step:
                    raise
                console.warn(f"refused, and not trained: {error}")
        return found

    async def _transform(self, groups: Sequence[ScoredGroup], dropped_by: dict[int, str]) -> Sequence[ScoredGroup]:
        """Return the groups that the transforms keep. For each other group, add the transform that left it out to `dropped_by`."""
        for name, teacher in self._parts.teachers.items():
            with self._profile.span(f"teacher.{name}", len(groups)), in_one_line(f"teacher {name!r} failed"):
                groups = await teacher.annotate(groups)
        for name, transform in self._parts.transforms.items():
            with self._profile.span(f"transform.{name}", len(groups)), in_one_line(f"transform {name!r} failed"):
                given, groups = groups, _checked(name, await transform(groups))
            left = {group.draw.id for group in groups}
            dropped_by |= {one.draw.id: f"transform.{name}" for one in given if one.draw.id not in left}
        return groups


def _checked(transform: str, groups: object) -> Sequence[ScoredGroup]:
    """Raises PluginError for anything but a list of groups, and for advantages that are not [G] or not finite."""
    if not isinstance(groups, Sequence) or not all(isinstance(group, ScoredGroup) for group in groups):
        raise PluginError(
            f"transform {transform!r} returned {type(groups).__name__}, not a list of groups.",
            remedy="Return the groups to be trained, or an empty list if there are none.",
        )
    for group in groups:
        if group.advantages is not None and np.shape(group.advantages) != (wanted := (len(group.episodes),)):
            raise PluginError(
                f"transform {transform!r} gave the group of task {group.task.id!r} advantages of shape "
                f"{np.shape(group.advantages)}, and it has {wanted[0]} episodes.",
                remedy=f"Give one advantage for each episode, shape {wanted}: group.with_advantages(...).",
            )
        of_tokens = (one.advantages for episode in group.episodes for one in episode.rollouts)
        if not all(np.isfinite(column).all() for column in (group.advantages, *of_tokens) if column is not None):
            raise PluginError(
                f"transform {transform!r} gave the group of task {group.task.id!r} an advantage that is not a finite number.",
                remedy=f"Look at what transform {transform!r} divides by, and at its weights: rewards are at most {LARGEST_REWARD:g}.",
            )
    return groups

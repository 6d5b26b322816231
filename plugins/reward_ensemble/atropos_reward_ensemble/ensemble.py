"""The reward `ensemble`: combines its members' ratings, and compares the members with each other."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from atropos_core import console
from atropos_core.errors import CheckpointError, DataError
from atropos_core.guards.endings import raise_first
from atropos_core.interfaces import Measured, Reward, Stateful
from atropos_core.types import Episode, Floats, Metrics, Task
from atropos_reward_ensemble.alpha import alpha
from atropos_reward_ensemble.combine import combined
from atropos_reward_ensemble.config import EnsembleOptions
from atropos_reward_ensemble.members import EnsembleMember
from atropos_reward_ensemble.missing import Ratings
from atropos_reward_ensemble.outlier_raters import Departures
from atropos_reward_ensemble.streaming import Reliability


class Ensemble(Reward):
    """`deterministic`: count ratings between two steps, in a fixed order, so that the result does not depend on which group was
    scored first. Otherwise each group counts at once."""

    def __init__(
        self, options: EnsembleOptions, members: Sequence[EnsembleMember], deterministic: bool = False
    ) -> None:
        self._options = options
        self._members = members
        self._names = [member.name for member in members]
        self._weights = np.array([options.members[name].weight for name in self._names])
        self._vetoes = np.array([options.members[name].veto for name in self._names])
        self._reliability = Reliability(
            len(members), options.metric, categories=options.categories, window=options.window
        )
        self._departures = Departures(
            len(members),
            tolerance=options.tolerance,
            false_alarm=options.false_alarm,
            horizon=options.horizon,
        )
        self._deterministic = deterministic
        self._pending: list[tuple[str, Ratings]] = []
        self._out = np.zeros(len(members), bool)  # excluded: no longer called
        self._calls = np.zeros(len(members))  # episodes, since the last metrics()
        self._missed = np.zeros(len(members))
        self._sums = np.zeros(len(members))  # of the ratings that were given
        self._short = self._gated = 0  # groups
        self._warned: set[str] = set()

    @property
    def queues(self) -> bool:
        return any(member.queues for member in self._members)

    async def open(self) -> None:
        """Start the members' processes. Raises the errors of starting them."""
        await asyncio.gather(*(member.open() for member in self._members))

    async def __call__(self, task: Task, episodes: Sequence[Episode]) -> Floats:
        """[G]. Raises DataError if an episode has too few ratings, or if `gate_alpha` fails the group."""
        weights, out = self._trusted(), self._out.copy()
        ratings, causes = await self._ask(task, episodes, out)
        self._note(ratings, causes, out, task)
        enough = (~np.isnan(ratings)).sum(axis=0) >= self._options.needed
        given = combined(
            ratings,
            self._options.combine,
            weights,
            threshold=self._options.threshold,
            trim=self._options.trim,
            vetoes=self._vetoes,
        )
        if not (enough & np.isfinite(given)).all():
            self._short += 1
            raise self._too_few(task, ratings, causes, enough & np.isfinite(given))
        self._gate(task, ratings)
        return np.asarray(given, np.float32)

    async def _ask(
        self, task: Task, episodes: Sequence[Episode], out: Any
    ) -> tuple[Ratings, dict[str, str]]:  # out: bool[R]
        """Ratings [R, G], and the causes of missing ones by member. With first_of, a member is called only if the earlier ones
        gave no rating; else all are called at once."""
        ratings = np.full((len(self._members), len(episodes)), np.nan)
        causes: dict[str, str] = {}
        called = [rater for rater in range(len(self._members)) if not out[rater]]
        if self._options.combine == "first_of":
            left = np.arange(len(episodes))
            for rater in called:
                if not len(left):
                    break
                given, cause = await self._members[rater].ask(task, [episodes[at] for at in left.tolist()])
                self._count(rater, given)
                ratings[rater, left] = given
                left = left[np.isnan(given)]
                causes |= {self._names[rater]: cause} if cause else {}
            return ratings, causes
        answers = await asyncio.gather(*(self._members[rater].ask(task, episodes) for rater in called))
        for rater, (given, cause) in zip(called, answers, strict=True):
            self._count(rater, given)
            ratings[rater] = given
            causes |= {self._names[rater]: cause} if cause else {}
        return ratings, causes

    def _count(self, rater: int, given: Ratings) -> None:
        self._calls[rater] += len(given)
        self._missed[rater] += int(np.isnan(given).sum())
        self._sums[rater] += float(np.nansum(given))

    def _trusted(self) -> Ratings:
        factor = self._options.downweight if self._options.on_departure == "downweight" else 1.0
        return self._weights * np.where(self._departures.flagged, factor, 1.0)

    def _note(self, ratings: Ratings, causes: Mapping[str, str], out: Any, task: Task) -> None:
        for name, cause in causes.items():
            if name not in self._warned:
                self._warned.add(name)
                console.warn(
                    f"reward ensemble: member {name!r} gave no rating: {cause} (reported once; its metric `missing` counts on)"
                )
        if self._deterministic:
            self._pending.append((task.id, ratings))
        else:
            self._learn(ratings)

    def _fold(self) -> None:
        """Count the pending ratings. Groups of one task with the same ratings are equal, so their order does not matter."""
        pending, self._pending = self._pending, []
        for _, ratings in sorted(pending, key=lambda one: (one[0], one[1].shape[1], one[1].tobytes())):
            self._learn(ratings)

    def _learn(self, ratings: Ratings) -> None:
        was_full = self._reliability.full
        self._reliability.add(ratings)
        if self._reliability.full and not was_full:
            console.warn(
                f"reward ensemble: more than {self._options.categories} different ratings (`categories`): from now on there is no "
                f'overall alpha, only that of the last {self._options.window} episodes. metric = "interval" has no such bound.'
            )
        for rater in self._departures.add(ratings):
            self._depart(rater)

    def _depart(self, rater: int) -> None:
        name, count = self._names[rater], len(self._members)
        done = {
            "warn": "nothing is changed",
            "downweight": f"its weight is multiplied by {self._options.downweight:g} from now on",
        }
        what = done.get(self._options.on_departure, "it is no longer called")
        if self._options.on_departure == "exclude":
            left = count - int(self._out.sum()) - 1
            if self._vetoes[rater]:
                what = "it is still called: its veto would be lost"
            elif left < max(self._options.needed, count // 2 + 1):
                what = "it is still called: too few others would remain to outvote it"
            else:
                self._out[rater] = True
        console.warn(
            f"reward ensemble: member {name!r} departs from the others (false alarms: {self._options.false_alarm:.2g} "
            f"within {self._options.horizon:,} groups); {what}."
        )

    def _too_few(self, task: Task, ratings: Ratings, causes: Mapping[str, str], rated: Any) -> DataError:
        there = (~np.isnan(ratings)).sum(axis=0)[~rated]
        why = "; ".join(f"{name}: {cause}" for name, cause in causes.items()) or "none failed"
        shut = [name for name, out in zip(self._names, self._out, strict=True) if out]
        return DataError(
            f"{len(there)} of {len(rated)} episodes of task {task.id!r} have too few ratings: {int(there.min())} where "
            f"{self._options.needed} of {len(self._members)} are needed ({self._options.combine}). {why}"
            + (f"; excluded: {', '.join(shut)}" if shut else "")
        )

    def _gate(self, task: Task, ratings: Ratings) -> None:
        if self._options.gate_alpha is None or ratings.shape[1] < 2:  # one episode cannot show agreement
            return
        found = alpha(ratings, self._options.metric)
        if found < self._options.gate_alpha:  # False for NaN: all ratings are equal
            self._gated += 1
            raise DataError(
                f"the members do not agree on task {task.id!r}: alpha {found:.3f} is below gate_alpha "
                f"{self._options.gate_alpha:g}; ratings "
                + "; ".join(f"{name} {row.tolist()}" for name, row in zip(self._names, ratings, strict=True))
            )

    def metrics(self) -> Metrics:
        self._fold()
        called, missed = self._calls, self._missed
        rolling, agreed = self._reliability.rolling()
        metrics: Metrics = {
            "alpha": self._reliability.alpha(),
            "alpha_rolling": rolling,
            "missing": float(missed.sum() / max(called.sum(), 1)),
            "groups_short": float(self._short),
            "groups_gated": float(self._gated),
            "flagged": float(self._departures.flagged.sum()),
        }
        suspicion = self._departures.suspicion()
        for rater, member in enumerate(self._members):
            metrics[f"{member.name}/agreement"] = float(agreed[rater])
            metrics[f"{member.name}/suspicion"] = float(suspicion[rater])
            metrics[f"{member.name}/flagged"] = float(self._departures.flagged[rater])
            metrics[f"{member.name}/missing"] = float(missed[rater] / max(called[rater], 1))
            if given := called[rater] - missed[rater]:
                metrics[f"{member.name}/mean"] = float(self._sums[rater] / given)
            if isinstance(member.reward, Measured):
                metrics |= {f"{member.name}/{key}": value for key, value in member.reward.metrics().items()}
        self._calls, self._missed, self._sums = np.zeros_like(called), np.zeros_like(missed), np.zeros_like(called)
        self._short = self._gated = 0
        return {name: value for name, value in metrics.items() if np.isfinite(value)}

    def state(self) -> Mapping[str, Any]:
        self._fold()
        return {
            "members": self._names,
            "reliability": self._reliability.state(),
            "departures": self._departures.state(),
            "out": self._out.tolist(),
            "counts": [self._calls.tolist(), self._missed.tolist(), self._short, self._gated, self._sums.tolist()],
            "inner": {one.name: one.reward.state() for one in self._members if isinstance(one.reward, Stateful)},
        }

    def load(self, state: Mapping[str, Any]) -> None:
        if list(state["members"]) != self._names:
            raise CheckpointError(
                f"the ensemble was saved with the members {', '.join(state['members'])}, and now has {', '.join(self._names)}."
            )
        self._reliability.load(state["reliability"])
        self._departures.load(state["departures"])
        self._out = np.array(state["out"], bool)
        called, missed, self._short, self._gated, *sums = state["counts"]
        self._calls, self._missed = np.array(called, np.float64), np.array(missed, np.float64)
        self._sums = np.array(sums[0] if sums else np.zeros_like(self._calls), np.float64)
        self._pending = []
        for member in self._members:
            if member.name in state["inner"] and isinstance(member.reward, Stateful):
                member.reward.load(state["inner"][member.name])

    async def close(self) -> None:
        raise_first(await asyncio.gather(*(member.close() for member in self._members), return_exceptions=True))

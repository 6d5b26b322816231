"""Call rewards again, to see if they are deterministic: for replies of this step, and for replies kept from the first step.

This does not change the run: in a deterministic run Python's and numpy's random states are restored, nothing is recorded, and
rewards with state or metrics of their own are skipped, since another call would change them. Late answers and exceptions are
left to other checks.
"""

from __future__ import annotations

import asyncio
import base64
import random
from collections.abc import Mapping, Sequence
from time import perf_counter
from typing import Any, cast

import numpy as np

from atropos_core.codec import decode, encode_bytes
from atropos_core.errors import DataError
from atropos_core.guards.deadlines import within
from atropos_core.interfaces import Environment, Measured, Reward, Stateful
from atropos_core.processes.proxies import HostedReward
from atropos_core.rollouts.runner import FATAL, WeightedReward
from atropos_core.turn_rewards import split_scores
from atropos_core.types import Episode, Floats, Metrics, Score, ScoredGroup

MOST_KEPT_BYTES = 1 << 18  # in every checkpoint
MOST_EPISODES = 16  # of a group that are scored again
MOST_S = 10.0  # that one look may take
BUDGET, BURST_S = 0.005, 0.05  # the share of the run's time that looks may take, and what they may be ahead of it
SCORE = "the environment's score"


class Rescoring:
    """`look` scores a few groups again every few steps, or less often if that would take more than half a percent of the time: a
    judge that takes a minute is called again after three hours."""

    def __init__(
        self,
        rewards: Sequence[WeightedReward],
        environments: Mapping[str, Environment],
        *,
        every: int,
        groups: int,
        deterministic: bool,
    ) -> None:
        self._rewards = rewards
        self._environments = environments
        self._every = every
        self._most = groups
        self._deterministic = deterministic
        self._began, self._spent_s = perf_counter(), 0.0
        self._late: asyncio.Future[Floats | Sequence[float | Score]] | None = (
            None  # an answer that did not come in time
        )
        self._kept: list[tuple[ScoredGroup, dict[str, Floats]]] = []  # and how they were scored at first

    async def look(self, step: int, groups: Sequence[ScoredGroup]) -> Metrics:
        """Return `rescore/difference`, the largest difference between two scores of this step's replies, and `rescore/shift`, the
        mean by which kept replies score higher than at first. Both are relative to the largest score, if that is above 1."""
        began = perf_counter()
        affordable = self._spent_s <= BURST_S + BUDGET * (began - self._began)
        still_repeated = self._late is not None and not self._late.done()
        if not self._every or (step - 1) % self._every or not affordable or still_repeated:
            return {}
        states = random.getstate(), np.random.get_state()
        try:
            async with asyncio.timeout(MOST_S):
                return await self._look(groups)
        except TimeoutError:  # a reward hangs: failed_rewards reports it
            return {}
        finally:
            if self._deterministic:  # otherwise rollouts continue meanwhile, and may use the same random states
                random.setstate(states[0])
                np.random.set_state(states[1])
            self._spent_s += perf_counter() - began

    def state(self) -> Mapping[str, Any]:
        kept = [{"group": group, "scores": scores} for group, scores in self._kept]
        return {"kept": base64.b64encode(encode_bytes(kept)).decode()}

    def load(self, state: Mapping[str, Any]) -> None:
        kept = decode(base64.b64decode(state["kept"]))
        self._kept = [(one["group"], dict(one["scores"])) for one in kept]

    async def _look(self, groups: Sequence[ScoredGroup]) -> Metrics:
        differences: list[float] = []
        shifts: list[float] = []
        fresh = [group for group in groups if group.episodes][: self._most]
        for group in fresh:
            first = _first_scores(group)
            for name, again in (await self._scores(group)).items():
                if name in first:
                    differences.append(float(np.abs(again - first[name]).max()) / _scale(first[name]))
        for group, first in self._kept:
            for name, again in (await self._scores(group)).items():
                if name in first:
                    shifts.append(float(np.mean(again.astype(np.float64) - first[name])) / _scale(first[name]))
        if not self._kept:
            self._keep(fresh)
        metrics: Metrics = {}
        if differences:
            metrics["rescore/difference"] = max(differences)
        if shifts:
            metrics["rescore/shift"] = max(shifts, key=abs)
        return metrics

    def _keep(self, groups: Sequence[ScoredGroup]) -> None:
        left = MOST_KEPT_BYTES
        for group in groups:
            if group.size_bytes <= left:
                left -= group.size_bytes
                self._kept.append((group, _first_scores(group)))

    async def _scores(self, group: ScoredGroup) -> dict[str, Floats]:
        """Return scores [G] by the name of the reward, without rewards that cannot be called again."""
        found: dict[str, Floats] = {}
        for of in self._rewards:
            if _may_be_repeated(of.reward):
                try:
                    answer = await within(self._answer(of, group), of.deadline_s, f"reward {of.name!r}")
                    scores = np.asarray(split_scores(answer, group.episodes)[0], np.float32)
                except FATAL:
                    raise
                except Exception:  # noqa: BLE001 - the plugin boundary; failed_rewards reports it
                    continue
                if scores.shape == (len(group.episodes),) and np.isfinite(scores).all():
                    found[of.name] = scores
        own = await self._environment_scores(group)
        return found if own is None else found | {SCORE: own}

    async def _answer(self, of: WeightedReward, group: ScoredGroup) -> Floats | Sequence[float | Score]:
        """Call the reward. A process is not cancelled, which would end it: if it is slow, it finishes later and its answer is
        ignored."""
        answer = of.reward(group.task, group.episodes)
        if not isinstance(of.reward, HostedReward):
            return await answer
        self._late = asyncio.ensure_future(answer)
        self._late.add_done_callback(lambda late: late.cancelled() or late.exception())  # reported if it comes in time
        return await asyncio.shield(self._late)

    async def _environment_scores(self, group: ScoredGroup) -> Floats | None:
        """Return the scores of an environment whose rollout() only calls score(); None for others."""
        environment = self._environments.get(group.draw.environment)
        if environment is None or isinstance(environment, Stateful | Measured) or not only_scores(environment):
            return None
        try:
            scored = [await environment.score(group.task, last_reply(one)) for one in group.episodes[:MOST_EPISODES]]
        except Exception:  # noqa: BLE001 - the plugin boundary; failed_plays reports it
            return None
        values = [one.value if isinstance(one, Score) else float(one) for one in scored]
        rest = [episode.score for episode in group.episodes[MOST_EPISODES:]]  # as they are
        return np.array([*values, *rest], np.float32)


def _first_scores(group: ScoredGroup) -> dict[str, Floats]:
    return dict(group.parts) | {SCORE: np.array([episode.score for episode in group.episodes], np.float32)}


def _may_be_repeated(reward: Reward) -> bool:
    if isinstance(reward, HostedReward):  # its numbers are those of the reward in the other process
        return not reward.metrics()
    return not isinstance(reward, Stateful | Measured)


def only_scores(environment: Environment) -> bool:
    """True if the environment's rollout is one reply, which its score() is called with."""
    kind = type(environment)
    return (
        kind.rollout is Environment.rollout
        and kind.rollout_group is Environment.rollout_group
        and kind.score is not Environment.score
    )


def last_reply(episode: Episode) -> Any:
    """Return the last reply, a Message. Raises DataError if the conversation does not end with one of the policy's."""
    if not episode.messages or episode.messages[-1].get("role") != "assistant":
        raise DataError("the conversation has no reply at its end")
    return cast(Any, episode.messages[-1])


def _scale(scores: Floats) -> float:
    return max(1.0, float(np.abs(scores).max(initial=0.0)))

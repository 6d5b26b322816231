"""Normalise rewards by their running mean and standard deviation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from atropos_core import console
from atropos_core.advantages import is_flat, is_noise
from atropos_core.errors import ConfigError
from atropos_core.interfaces import Transform
from atropos_core.turn_rewards import with_turns
from atropos_core.types import Episode, Floats, Metrics, ScoredGroup, TurnRewards
from atropos_normalization.config import ZScoreOptions
from atropos_normalization.moments import Moments, keep_of

RAW = "raw_reward"  # the part that keeps the original reward


class ZScore(Transform):
    """z = (R - mean) / std, over all rewards of the scope so far, including those of this step.

    All groups of a call are counted before any is normalised, so z does not depend on their order. If the deviation is only
    noise, by the measure of `group_advantage`, nothing is divided: rewards that are all alike become 0, not the quotient of two
    roundings. A flat group stays flat.
    """

    def __init__(self, options: ZScoreOptions) -> None:
        self._options = options
        self._keep = keep_of(options.half_life)
        self._moments: dict[str, Moments] = {}  # by environment; global: ""
        self._seen = self._clipped = self._unchanged = 0  # rewards of the step

    async def __call__(self, groups: Sequence[ScoredGroup]) -> Sequence[ScoredGroup]:
        if any(group.advantages is not None for group in groups):
            raise ConfigError(
                "the transform 'zscore' got groups that already have advantages, so that changing their rewards "
                "would have no effect.",
                remedy="Name it before group_advantage in the run file: transforms run in that order.",
            )
        rewards: dict[str, list[Floats]] = {}
        for group in groups:
            rewards.setdefault(self._scope(group), []).append(group.rewards)
        for scope, several in rewards.items():
            self._moments[scope] = self._moments.get(scope, Moments()).then(np.concatenate(several), self._keep)
        return [self._normalised(group) for group in groups]

    def metrics(self) -> Metrics:
        """`mean`, `std` and `count` of the rewards so far (`ENVIRONMENT/mean` for scope = "environment"); `clipped` and
        `unchanged` (warm-up), as shares of the step's rewards."""
        metrics: Metrics = {
            "clipped": self._clipped / max(self._seen, 1),
            "unchanged": self._unchanged / max(self._seen, 1),
        }
        for scope, moments in self._moments.items():
            prefix = f"{scope}/" if scope else ""
            metrics |= {
                f"{prefix}mean": moments.mean,
                f"{prefix}std": moments.std,
                f"{prefix}count": float(moments.count),
            }
        self._seen = self._clipped = self._unchanged = 0
        return metrics

    def state(self) -> Mapping[str, Any]:
        return {
            "scope": self._options.scope,
            "moments": {scope: moments.state() for scope, moments in self._moments.items()},
        }

    def load(self, state: Mapping[str, Any]) -> None:
        if state["scope"] != self._options.scope:
            raise ConfigError(
                f'scope is "{self._options.scope}", and the statistics were gathered with scope = "{state["scope"]}"'
            )
        self._moments = {scope: Moments.from_state(moments) for scope, moments in state["moments"].items()}

    def _scope(self, group: ScoredGroup) -> str:
        return "" if self._options.scope == "global" else group.draw.environment

    def _normalised(self, group: ScoredGroup) -> ScoredGroup:
        moments = self._moments[self._scope(group)]
        self._seen += len(group.rewards)
        if moments.count < self._options.warm_up:
            self._unchanged += len(group.rewards)
            return group
        values, clipped = normalised(group.rewards, moments, self._options)
        self._clipped += clipped
        divisor = _divisor(moments, self._options)
        episodes = group.episodes if divisor == 1.0 else tuple(_divided(one, divisor) for one in group.episodes)
        return replace(group, episodes=episodes, rewards=values, parts={RAW: group.rewards, **group.parts})


def normalised(rewards: Floats, moments: Moments, options: ZScoreOptions) -> tuple[Floats, int]:
    """The normalised rewards [G] of one group, and how many of them were clipped."""
    values = rewards.astype(np.float64)
    if is_flat(rewards):
        values = np.full_like(values, values.mean())  # so that noise within a group does not become a difference
    mean, std = moments.mean, moments.std
    clipped = 0
    away = values - mean
    if not is_noise(std, abs(mean)) and options.clip is not None:
        bound = options.clip * std
        clipped = int((np.abs(away) > bound).sum())
        away = np.clip(away, -bound, bound)
    made = away if options.center else away + mean
    return np.asarray(made / _divisor(moments, options), np.float32), clipped


def _divisor(moments: Moments, options: ZScoreOptions) -> float:
    return 1.0 if not options.scale or is_noise(moments.std, abs(moments.mean)) else moments.std


def _divided(episode: Episode, divisor: float) -> Episode:
    """Return the episode with its turn rewards divided, as its reward is. What centring and clipping change is of the outcome."""
    if all(rollout.turns is None for rollout in episode.rollouts):
        return episode
    turns = [
        None if rollout.turns is None else TurnRewards(rollout.turns.ends, 1.0 / divisor * rollout.turns.values)
        for rollout in episode.rollouts
    ]
    return replace(episode, rollouts=with_turns(episode.rollouts, tuple(turns)))


def idle_reason(options: ZScoreOptions, announced: Mapping[str, Any]) -> str:
    """The reason why later transforms undo zscore, and what to change; empty if it matters, or if they do not say."""
    of = announced.get("advantages")
    if of is None or "undoes" not in of or not (options.center or options.scale):
        return ""
    does = [name for name, done in (("offset", options.center), ("factor", options.scale)) if done]
    undoes: Mapping[str, str] = of["undoes"]
    if any(name not in undoes for name in does):
        return ""
    if not options.scale and "factor" not in undoes:
        change = "scale = true in [transform.zscore]"
    else:
        change = f"{undoes[does[-1]]} in [transform.{of['by']}]"
    return f"{of['by']} undoes any common {' and '.join(does)} of a group's rewards. It matters with {change}."


def warn_if_idle(options: ZScoreOptions, announced: Mapping[str, Any]) -> None:
    if why := idle_reason(options, announced):
        but = f" What remains is clipping, at {options.clip:g} sigmas." if options.clip else ""
        console.warn(f"the transform zscore cannot matter here: {why}{but}")

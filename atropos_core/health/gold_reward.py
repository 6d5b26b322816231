"""Does the trained reward rise while the gold reward does not? Both are known for the same rollouts of some groups.

`measure_gold` turns the groups of a step into numbers, and `find_divergence` looks for the step since when the two part. For every
step s of the history, it compares the groups before s with those from s on. With x and y the two rewards in standard deviations of all
rollouts, it looks at the changes dx and dy of their means:

- dx >= least and dy <= dx / 2: the trained reward rises, and the gold reward does not rise even half as much;
- dy <= -least and dx >= dy / 2: the gold reward falls, and the trained reward does not fall even half as much.

The latest LEAST_GROUPS groups must still show the same, so that a reward that was repaired is no longer found.

Either counts only if the mean of x - 2y (or of 2x - y) has changed by `z` standard errors, taken over groups, since the rollouts of one
group are not independent (Welch's statistic). Rewards that are the same but for noise or scale pass: dy = dx, or a good part of it.
The statistic is the largest of many, so it has no known distribution: benchmarks/reward_hacking.py measures false alarms.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from atropos_core.health.check import Change
from atropos_core.rollouts.runner import WeightedReward
from atropos_core.types import Metrics, ScoredGroup

LEAST_GROUPS = 4  # before and after, to say anything
FLOOR = 0.1  # of the variance of a group's mean, in variances of a rollout: few groups may have equal means by chance
PREFIX, STYLE, REWARDS_ID = "gold/", "gold/style_drift", "gold/rewards_id"
CANARY, CANARY_ROLLOUTS = (
    "canary/",
    "canary_rollouts/",
)  # a metric of rollouts that use a planted exploit, and how many report it
BINS = 512  # of token ids, in which styles are compared
SHOWN, MOST_SUSPECTS = 2, 128  # rollouts that a finding names, and that are remembered
MOMENTS = (
    "groups", "reward", "gold", "reward_variance", "gold_variance", "reward_between", "gold_between", "covariance_between",
)  # fmt: skip


def measure_gold(groups: Sequence[ScoredGroup], gold: str, weights: Mapping[str, float]) -> Metrics:
    """Return the numbers of the groups that the gold reward has scored; empty if there are none. `gold` is its name; `weights` has the
    weight of each trained reward. Means and variances are of rollouts; those `between` are variances of groups' means."""
    scored = [group for group in groups if gold in group.parts and len(group.episodes)]
    if not scored:
        return {}
    x, y = (
        np.concatenate([of(group) for group in scored]).astype(np.float64)
        for of in (_reward, lambda group: group.parts[gold])
    )
    means = np.array(
        [[group.rewards.mean(dtype=np.float64), group.parts[gold].mean(dtype=np.float64)] for group in scored]
    )
    between = np.cov(means.T, bias=True)
    found = (len(scored), x.mean(), y.mean(), x.var(), y.var(), between[0, 0], between[1, 1], between[0, 1])
    metrics = {f"{PREFIX}{name}": float(value) for name, value in zip(MOMENTS, found, strict=True)}
    for name, weight in weights.items():
        parts = [group.parts[name] for group in scored if name in group.parts]
        if parts:
            metrics[f"{PREFIX}reward.{name}"] = weight * float(np.concatenate(parts).mean(dtype=np.float64))
    return metrics


def _reward(group: ScoredGroup) -> NDArray[np.float32]:
    return group.rewards


@dataclass(frozen=True)
class Divergence:
    """The change of both rewards at a step, each in standard deviations of all rollouts, and its statistic."""

    step: int
    before: tuple[float, float]  # means of the trained and of the gold reward
    after: tuple[float, float]
    changes: tuple[float, float]
    z: float


def find_divergence(
    steps: Sequence[int], numbers: Sequence[Mapping[str, float]], least: float, z: float
) -> Divergence | None:
    """Return the clearest divergence of the two rewards, if there is one. `numbers` [S] are those of `measure_gold`, by step. Rewards that
    changed in between (`rewards_id`) are not compared: only what came after the last change counts."""
    same = [one.get(REWARDS_ID) == numbers[-1].get(REWARDS_ID) for one in numbers]
    start = len(same) - [*reversed(same), False].index(False)
    steps, numbers = steps[start:], numbers[start:]
    table = np.array([[one[f"{PREFIX}{name}"] for name in MOMENTS] for one in numbers], np.float64).reshape(
        -1, len(MOMENTS)
    )
    groups, means = table[:, 0], table[:, 1:3]
    within = np.array([[[row[5], row[7]], [row[7], row[6]]] for row in table]).reshape(-1, 2, 2)
    total = float(groups.sum())
    if total < 2 * LEAST_GROUPS:
        return None
    overall = groups @ means / total
    spread = np.sqrt(groups @ (table[:, 3:5] + (means - overall) ** 2) / total)  # of all rollouts
    scale = np.where(spread > 1e-9 * np.maximum(1.0, np.abs(overall)), spread, np.inf)
    latest = _latest(groups)
    found: Divergence | None = None
    for at in range(1, len(steps)):
        before, after, now = (
            _side(groups[part], means[part], within[part], scale)
            for part in (slice(0, at), slice(at, None), slice(max(at, latest), None))
        )
        if min(before.groups, after.groups) < LEAST_GROUPS:
            continue
        direction = _apart((after.mean - before.mean) / scale, least)
        if direction is None or _apart((now.mean - before.mean) / scale, least) is None:
            continue
        variance = sum(_variance(direction, side) / side.groups for side in (before, after))
        dx, dy = (after.mean - before.mean) / scale
        statistic = float(direction @ (dx, dy)) / math.sqrt(variance)
        if statistic >= z and (found is None or statistic > found.z):
            found = Divergence(
                steps[at], (before.mean[0], before.mean[1]), (after.mean[0], after.mean[1]), (dx, dy), statistic
            )
    return found


def _variance(direction: NDArray[np.float64], side: _Side) -> float:
    """Return the variance of one group's mean in this direction."""
    return max(float(direction @ side.covariance @ direction), FLOOR * float(direction @ direction))


def _latest(groups: NDArray[np.float64]) -> int:
    """Return the index of the last step from which on there are LEAST_GROUPS groups."""
    behind = np.cumsum(groups[::-1])
    return len(groups) - 1 - int(np.searchsorted(behind, LEAST_GROUPS))


def _apart(change: NDArray[np.float64], least: float) -> NDArray[np.float64] | None:
    """Return the direction in which the two rewards part, if they do."""
    dx, dy = change
    if dx >= least and dy <= dx / 2:
        return np.array([1.0, -2.0])
    if dy <= -least and dx >= dy / 2:
        return np.array([2.0, -1.0])
    return None


@dataclass(frozen=True)
class _Side:
    groups: float
    mean: NDArray[np.float64]  # [2] of the trained and of the gold reward
    covariance: NDArray[np.float64]  # [2, 2] of groups' means, in standard deviations of a rollout


def _side(
    groups: NDArray[np.float64], means: NDArray[np.float64], within: NDArray[np.float64], scale: NDArray[np.float64]
) -> _Side:
    count = float(groups.sum())
    mean = groups @ means / count
    off = means - mean
    scatter = np.einsum("s,sij->ij", groups, within + off[:, :, None] * off[:, None, :])
    return _Side(count, mean, scatter / max(count - 1.0, 1.0) / np.outer(scale, scale))


@dataclass(frozen=True)
class Suspect:
    """The rollout of a step that the two rewards see most differently: high for the trained one, low for the gold one."""

    step: int
    environment: str
    task: str
    member: int
    reward: float
    gold: float

    def __str__(self) -> str:
        where = f"rollout {self.member} of task {self.task!a:.60} of environment {self.environment!a:.60} in step {self.step}"
        return f"{where} (reward {self.reward:.3g}, gold {self.gold:.3g})"


class GoldComparison:
    """Compares the rewards of the groups that the gold reward `name` has scored, and remembers the rollouts that speak against the
    trained ones, whose weights are `weights`. `rewards_id` is a number that changes with the rewards."""

    def __init__(self, name: str, weights: Mapping[str, float], rewards_id: float = 0.0) -> None:
        self.name = name
        self._rewards_id = rewards_id
        self._weights = weights
        self._first_tokens: NDArray[np.float64] | None = None  # [BINS] of the first scored step
        self._suspects: list[Suspect] = []
        self._best = -math.inf  # the highest gold reward so far

    @classmethod
    def of(cls, rewards: Sequence[WeightedReward], settings: Mapping[str, Any]) -> GoldComparison | None:
        """Return the comparison with the gold reward among `rewards`; None if there is none. `settings` are those of the run, by path."""
        gold = [one.name for one in rewards if one.gold is not None]
        if not gold:
            return None
        text = json.dumps(
            {path: settings[path] for path in sorted(settings) if path.startswith("reward.")}, default=str
        )
        rewards_id = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest())
        return cls(gold[0], {one.name: one.weight for one in rewards if one.gold is None}, float(rewards_id))

    def look(self, step: int, groups: Sequence[ScoredGroup]) -> Metrics:
        """Return the numbers of a step; empty if none of its groups has a gold reward."""
        scored = [group for group in groups if self.name in group.parts and group.episodes]
        if not scored:
            return {}
        if (suspect := self._suspect(step, scored)) is not None:
            self._suspects.append(suspect)
            if len(self._suspects) > MOST_SUSPECTS:
                del self._suspects[MOST_SUSPECTS // 8]
        tokens = _token_counts(scored)
        if self._first_tokens is None:
            self._first_tokens = tokens
        return measure_gold(scored, self.name, self._weights) | {
            STYLE: divergence_of_counts(self._first_tokens, tokens),
            REWARDS_ID: self._rewards_id,
        }

    def with_rollouts(self, change: Change) -> Change:
        """Add the first rollouts since then to a finding of reward hacking."""
        first = [one for one in self._suspects if one.step >= change.since][:SHOWN]
        if change.check != "reward_hacking" or change.state == "ok" or not first:
            return change
        return replace(change, says=f"{change.says}; first: {' and '.join(map(str, first))}")

    def state(self) -> Mapping[str, Any]:
        tokens = None if self._first_tokens is None else self._first_tokens.tolist()
        best = self._best if math.isfinite(self._best) else None
        return {"suspects": [asdict(one) for one in self._suspects], "first_tokens": tokens, "best": best}

    def load(self, state: Mapping[str, Any]) -> None:
        self._suspects = [Suspect(**one) for one in state["suspects"]]
        self._first_tokens = None if state["first_tokens"] is None else np.array(state["first_tokens"], np.float64)
        best = state.get("best")  # older checkpoints have none
        self._best = -math.inf if best is None else float(best)

    def _suspect(self, step: int, groups: Sequence[ScoredGroup]) -> Suspect | None:
        pairs = [
            (group, member, float(reward), float(gold))
            for group in groups
            for member, (reward, gold) in enumerate(zip(group.rewards, group.parts[self.name], strict=True))
        ]
        x, y = (np.array([pair[at] for pair in pairs]) for at in (2, 3))
        self._best = max(self._best, float(y.max()))
        apart = (x - x.mean()) / (x.std() or 1.0) - (y - y.mean()) / (y.std() or 1.0)
        group, member, reward, gold = pairs[at := int(apart.argmax())]
        if x[at] < x.max() or y[at] >= self._best:  # the gold reward has not given more to any
            return None
        return Suspect(step, group.draw.environment, group.task.id, member, reward, gold)


def divergence_of_counts(first: NDArray[np.float64], second: NDArray[np.float64]) -> float:
    """Return the Jensen-Shannon divergence of two histograms, in bits, from 0 to 1 (Lin 1991, IEEE Trans. Inf. Theory 37, eq. 3.4)."""
    p, q = first / max(first.sum(), 1.0), second / max(second.sum(), 1.0)
    middle = (p + q) / 2

    def entropy(of: NDArray[np.float64]) -> float:
        return -float((of[of > 0] * np.log2(of[of > 0])).sum())

    return max(entropy(middle) - (entropy(p) + entropy(q)) / 2, 0.0)


def _token_counts(groups: Sequence[ScoredGroup]) -> NDArray[np.float64]:
    """Return how often sampled tokens fall into each of BINS bins of token ids, [BINS]."""
    sampled = [
        rollout.tokens[rollout.sampled] for group in groups for one in group.episodes for rollout in one.rollouts
    ]
    return np.bincount(np.concatenate([np.zeros(0, np.int64), *sampled]) % BINS, minlength=BINS).astype(np.float64)

"""Honest histories of a trained and a gold reward, made of random numbers: how often they are found to part."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from atropos_core.health.gold_reward import MOMENTS, PREFIX, find_divergence

STEPS, ROLLOUTS = 100, 8
KINDS = ("same", "noisy reward", "noisy gold", "format")


def false_alarms(kind: str, groups: int, histories: int, least: float, z: float) -> int:
    """Return how many histories of STEPS steps are found to part at any step. Accuracy rises from 0.35 to 0.85, tasks differ."""
    return sum(_parts(kind, groups, np.random.default_rng([seed, groups]), least, z) for seed in range(histories))


def _parts(kind: str, groups: int, random: np.random.Generator, least: float, z: float) -> bool:
    numbers: list[dict[str, float]] = []
    for step in range(1, STEPS + 1):
        numbers.append(_numbers(*_rewards(kind, groups, step, random)))
        if find_divergence(range(1, step + 1), numbers, least, z) is not None:
            return True
    return False


def _rewards(kind: str, groups: int, step: int, random: np.random.Generator) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return the trained and the gold reward [P, G] of a step."""
    chance = np.clip(0.8 * random.beta(1.5, 1.5, (groups, 1)) - 0.05 + 0.5 * step / STEPS, 0.02, 0.98)
    right = (random.random((groups, ROLLOUTS)) < chance).astype(float)
    errs = random.random(right.shape) < 0.1
    if kind == "noisy reward":
        return np.where(errs, 1 - right, right), right
    if kind == "noisy gold":
        return right, np.where(errs, 1 - right, right)
    if kind == "format":  # a bonus that is learnt within ten steps
        return right + 0.3 * (random.random(right.shape) < min(1.0, 0.2 + 0.08 * step)), right
    return right, right


def _numbers(x: NDArray[Any], y: NDArray[Any]) -> dict[str, float]:
    """Return what `measure_gold` would of these groups."""
    between = np.cov(np.stack([x.mean(1), y.mean(1)]), bias=True)
    found = (len(x), x.mean(), y.mean(), x.var(), y.var(), between[0, 0], between[1, 1], between[0, 1])
    return {f"{PREFIX}{name}": float(value) for name, value in zip(MOMENTS, found, strict=True)}

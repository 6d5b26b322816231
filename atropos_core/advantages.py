"""Advantages of a group's rewards, as pure functions."""

from __future__ import annotations

import numpy as np

from atropos_core.types import Floats

ABSOLUTE_EPS = 1e-6
RELATIVE_EPS = 1e-4


def is_flat(rewards: Floats) -> bool:
    """Whether the rewards [G] are equal up to noise: their standard deviation is at most
    max(ABSOLUTE_EPS, RELATIVE_EPS * max|R|). Dividing by it would turn noise into advantages of full size."""
    if len(rewards) < 2:
        return True
    values = rewards.astype(np.float64)
    return bool(values.std(ddof=1) <= max(ABSOLUTE_EPS, RELATIVE_EPS * np.abs(values).max()))


def group_advantages(rewards: Floats, *, divide_by_std: bool = True) -> Floats:
    """GRPO (arXiv 2402.03300, eq. 4.1.2): (R - mean) / std over the rewards [G] of one task, the standard deviation
    Bessel-corrected as in TRL and verl, but with no epsilon added to it: flat groups, a group of one among them, get
    exactly 0 instead. `divide_by_std=False` is Dr.GRPO (arXiv 2503.20783): R - mean."""
    if is_flat(rewards):
        return np.zeros(len(rewards), np.float32)
    values = rewards.astype(np.float64)
    centred = values - values.mean()
    return np.asarray(centred / values.std(ddof=1) if divide_by_std else centred, np.float32)

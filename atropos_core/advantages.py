"""Advantages of a group's rewards, and how the losses of a batch's tokens are averaged, as pure functions."""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import NDArray

from atropos_core.types import Bools, Floats

Baseline = Literal["group", "others", "none"]
Average = Literal["sequence", "token", "constant", "sum"]

NOISE = 1e-6  # of the largest reward, or of 1: eight times what float32 rounds by


def is_noise(deviation: float, largest: float) -> bool:
    """True if a standard deviation of values up to |`largest`| may be rounding: at most a millionth of `largest`, or of 1 if that
    is larger, since small rewards are often differences of larger numbers."""
    return deviation <= NOISE * max(1.0, largest)


def is_flat(rewards: Floats) -> bool:
    """True if the rewards [G] are equal up to noise (`is_noise`); dividing by noise would make full-size advantages of it. Larger
    differences count, however far the rewards are from 0: 100, 100, 100.01 is not flat."""
    if len(rewards) < 2:
        return True
    values = rewards.astype(np.float64)
    return is_noise(float(values.std(ddof=1)), float(np.abs(values).max()))


def group_advantages(rewards: Floats, baseline: Baseline = "group", *, divide_by_std: bool = True) -> Floats:
    """Advantages of the rewards [G] of one task.

    - group: (R - mean) / std (GRPO, arXiv 2402.03300, section 4.1.2), the standard deviation Bessel-corrected as in TRL and
      verl, but with no epsilon added to it; without `divide_by_std` R - mean (Dr.GRPO, arXiv 2503.20783).
    - others: R_i - mean of the others' rewards (RLOO, arXiv 2402.14740, eq. 4), which is G / (G - 1) times R - mean.
    - none: R itself (REINFORCE), not divided by anything.

    With a baseline, flat groups (`is_flat`), including a group of one, get exactly 0.
    """
    values = rewards.astype(np.float64)
    if baseline == "none":
        return np.asarray(values, np.float32)
    if is_flat(rewards):
        return np.zeros(len(rewards), np.float32)
    if baseline == "others":
        return np.asarray(values - (values.sum() - values) / (len(values) - 1), np.float32)
    centred = values - values.mean()
    return np.asarray(centred / values.std(ddof=1) if divide_by_std else centred, np.float32)


def token_weights(
    average: Average, trained: Bools, offsets: NDArray[np.int64], loss_length: int | None = None
) -> Floats:
    """Per token w: f32[N], 0 where not trained. `offsets` [S + 1] are those of whole episodes, which count once each however
    many rollouts they are in. S counts the sequences that have a trained token, |o_i| those tokens.

    - sequence: 1 / (S |o_i|), the mean over a sequence, then over sequences (GRPO, arXiv 2402.03300, eq. 3).
    - token: 1 / sum_i |o_i|, the mean over all tokens of the minibatch (DAPO, arXiv 2503.14476, eq. 8).
    - constant: 1 / (S L) with L = `loss_length`, the token sum over a constant length (Dr.GRPO, arXiv 2503.20783, section
      3.2). TRL's B * L_max and verl's seq-mean-token-sum-norm are the same; verl before 0.7.1 divides by L only.
    - sum: 1 / S, the token sum, then the mean over sequences: the policy gradient as it is derived (REINFORCE, RLOO).
    """
    counts = np.add.reduceat(trained.astype(np.int64), offsets[:-1])  # [S]
    sequences = max(int((counts > 0).sum()), 1)
    if average == "sequence":
        each = 1.0 / (sequences * np.maximum(counts, 1))
    elif average == "token":
        each = np.full(len(counts), 1.0 / max(int(counts.sum()), 1))
    elif average == "constant":
        assert loss_length is not None, "the options see to it"
        each = np.full(len(counts), 1.0 / (sequences * loss_length))
    else:
        each = np.full(len(counts), 1.0 / sequences)
    weights = np.repeat(each, np.diff(offsets)) * trained
    return weights.astype(np.float32)

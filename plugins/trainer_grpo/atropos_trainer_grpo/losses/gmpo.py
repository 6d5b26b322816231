"""GMPO: the geometric mean of a sequence's ratios, each clipped before the mean (Geometric-Mean Policy Optimization, arXiv
2507.20673).

Its objective is the mean over sequences of A times (prod_t c_t)^(1/|o|), where c_t is the token's ratio, bounded on the side on
which the sign of A would push it further. GSPO takes the mean of the ratios first and bounds that, so a single token can
take a whole sequence out of the update. The bounds are the paper's, from e^-0.4 to e^0.4.
"""

from __future__ import annotations

import math

import torch

from atropos_trainer_grpo.losses.rows import Clip, Loss, Rows, Surrogate, bounded_exp


def geometric_mean(rows: Rows, clip: Clip) -> Surrogate:
    """-A exp(mean_t log c_t). Each token carries its own part of the gradient of the mean, and has none if its ratio is beyond its
    bound. This equals the paper if all tokens of a sequence have the same advantage, and leaves each token its own if they have
    several (turn rewards). As TRL's `GMPOTrainer` and verl's `geo_mean`, whose bounds are logarithms."""
    low, high = _log(1.0 - clip.low), _log(1.0 + clip.high)
    logs = rows.logprobs - rows.old
    seen = logs.detach()
    above, below = (rows.advantages > 0) & (seen > high), (rows.advantages < 0) & (seen < low)
    stopped = above | below
    bounded = torch.where(above, high, torch.where(below, low, logs))
    fixed = bounded.detach()
    ratio = bounded_exp(rows.mean_by_sequence(fixed) + (bounded - fixed))
    return Surrogate(-ratio * rows.advantages, ratio.detach(), stopped)


def _log(bound: float) -> float:
    return math.log(bound) if bound > 0 else -math.inf


GMPO = Loss(
    "gmpo", geometric_mean, "sequence", Clip(1.0 - math.exp(-0.4), math.exp(0.4) - 1.0),
    holds_fixed=True, needs_whole=True,
)  # fmt: skip

"""Estimators of KL(policy || reference) from the tokens that the policy sampled (Schulman, 2020, "Approximating KL
Divergence").

As values all three estimate the same divergence. As losses they do not: with d = logprobs - reference, on tokens of the
policy itself, the expected gradient of k1 is 0, that of k2 is the gradient of KL(policy || reference), which is what is
wanted, and that of k3 is the gradient of KL(reference || policy). GRPO's paper, TRL and verl's default use k3.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from atropos_trainer_grpo.losses import FURTHEST

Estimator = Literal["k1", "k2", "k3"]


def divergence(estimator: Estimator, logprobs: Tensor, reference: Tensor) -> Tensor:
    """[R], with the gradient of `logprobs`: k1 = d, k2 = d^2 / 2, k3 = exp(-d) - 1 + d. The
    exponential goes no further than e^60, and pushes as hard beyond as there (`losses.bounded_exp`)."""
    difference = logprobs - reference
    if estimator == "k1":
        return difference
    if estimator == "k2":
        return difference.square() / 2
    fixed = difference.detach()
    growth = torch.expm1((-fixed).clamp(max=FURTHEST))
    # The slope is -expm1(-d): autograd's own, 1 - exp(-d), has no digits left where d is small.
    return growth + fixed - growth * (difference - fixed)

"""Estimators of KL(policy || reference) from the tokens that the policy sampled (Schulman, 2020, "Approximating KL
Divergence").

As values all three estimate the same divergence. As losses they do not: with d = logprobs - reference, on tokens of the
policy itself, the expected gradient of k1 is 0, that of k2 is the gradient of KL(policy || reference), which is what is
wanted, and that of k3 is the gradient of KL(reference || policy). GRPO's paper and verl's default use k3. k3_ratio is k3 times the
ratio to the policy that sampled, with the gradient of both (DeepSeek-V3.2, section 3.1, "Unbiased KL Estimate"; TRL's
`use_bias_correction_kl`): its expected gradient is that of KL(policy || reference), also for tokens of an older policy.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from atropos_trainer_grpo.losses import FURTHEST, bounded_exp

Estimator = Literal["k1", "k2", "k3", "k3_ratio"]


def divergence(estimator: Estimator, logprobs: Tensor, reference: Tensor, old: Tensor | None = None) -> Tensor:
    """[R], with the gradient of `logprobs`: k1 = d, k2 = d^2 / 2, k3 = exp(-d) - 1 + d, k3_ratio = k3 exp(logprobs - old). The
    exponentials go no further than e^60, and push as hard beyond as there (`losses.bounded_exp`)."""
    if estimator == "k3_ratio":
        assert old is not None, "the ratio is to the old policy"
        return divergence("k3", logprobs, reference) * bounded_exp(logprobs - old)
    difference = logprobs - reference
    if estimator == "k1":
        return difference
    if estimator == "k2":
        return difference.square() / 2
    fixed = difference.detach()
    growth = torch.expm1((-fixed).clamp(max=FURTHEST))
    # The slope is -expm1(-d): autograd's own, 1 - exp(-d), has no digits left where d is small.
    return growth + fixed - growth * (difference - fixed)

"""VESPO: the policy gradient weighed by a Gamma kernel of the whole sequence's ratio (Variational Sequence-level Soft Policy
Optimization, arXiv 2602.10693, section 3.4)."""

from __future__ import annotations

import torch

from atropos_trainer_grpo.losses.rows import FURTHEST, Clip, Loss, Rows, Surrogate


def weighed_by_kernel(
    rows: Rows, clip: Clip, k_pos: float = 2.0, lambda_pos: float = 3.0, k_neg: float = 3.0, lambda_neg: float = 2.0
) -> Surrogate:
    """-sg(phi(W)) A log p with W the product of the sequence's ratios and phi(W) = W^k exp(lambda (1 - W)): 1 at W = 1, most
    at W = k / lambda, and 0 at either end. k and lambda are `_pos` where A >= 0 and `_neg` elsewhere. No length is divided by,
    and no bound of `clip` is looked at. As TRL's `vespo`, which bounds each token's log-ratio to 20 nats and log W to -18.4
    from below, where phi is under 2e-15."""
    log_w = rows.sum_by_sequence((rows.logprobs - rows.old).detach()).clamp(max=FURTHEST)
    good = rows.advantages >= 0
    k = torch.full_like(log_w, k_neg).masked_fill(good, k_pos)
    decay = torch.full_like(log_w, lambda_neg).masked_fill(good, lambda_pos)
    phi = (k * log_w + decay * (1.0 - log_w.exp())).exp()
    return Surrogate(-phi * rows.advantages * rows.logprobs, rows.ratio().detach(), weight=phi)


VESPO = Loss("vespo", weighed_by_kernel, "token", Clip(0.2, 0.2), holds_fixed=True, needs_whole=True)

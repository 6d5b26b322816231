"""Ratios within bounds, by token or by sequence: GRPO, Dr.GRPO, DAPO, GSPO, CISPO; and the policy gradient without one."""

from __future__ import annotations

import torch
from torch import Tensor

from atropos_trainer_grpo.losses.rows import Clip, Loss, Rows, Surrogate, bounded_exp


def clipped_by_token(rows: Rows, clip: Clip) -> Surrogate:
    """-min(r A, clip(r, 1 - low, 1 + high) A) with r = exp(logprobs - old), for either sign of A (PPO, arXiv 1707.06347,
    eq. 7). With `dual` c, -max(min(...), c A) where A < 0 (Ye et al., arXiv 1912.09729, eq. 5)."""
    return _clipped(rows.ratio(), rows.advantages, clip)


def clipped_by_sequence(rows: Rows, clip: Clip) -> Surrogate:
    """The same with the sequence's ratio s = exp(mean_t(logprobs - old)) in place of the token's (GSPO, arXiv 2507.18071,
    eq. 5). Each token carries its part of the gradient of s, the paper's GSPO-token (eq. 13), which equals GSPO if all
    tokens of a sequence have the same advantage."""
    log_ratio = rows.mean_by_sequence((rows.logprobs - rows.old).detach())
    return _clipped(bounded_exp(log_ratio + (rows.logprobs - rows.logprobs.detach())), rows.advantages, clip)


def weighed_by_ratio(rows: Rows, clip: Clip) -> Surrogate:
    """-sg(clip(r, 1 - low, 1 + high)) A logprobs: no token loses its gradient (CISPO, arXiv 2506.13585, eq. 4)."""
    ratio = rows.ratio().detach()
    bounded = ratio.clamp(1.0 - clip.low, 1.0 + clip.high)
    return Surrogate(-bounded * rows.advantages * rows.logprobs, ratio)


def policy_gradient(rows: Rows, clip: Clip) -> Surrogate:
    """-A logprobs, the policy gradient itself (Williams 1992), with no ratio: several updates on one batch, or stale
    tokens, are as if they were fresh. With the advantages of RLOO (arXiv 2402.14740) it is RLOO."""
    return Surrogate(-rows.advantages * rows.logprobs, rows.ratio().detach())


def _clipped(ratio: Tensor, advantages: Tensor, clip: Clip) -> Surrogate:
    """Return -ratio A while the ratio may still move that way, and -A times the bound once it has passed that bound."""
    seen, good, bad = ratio.detach(), advantages > 0, advantages < 0
    above, below = good & (seen > 1.0 + clip.high), bad & (seen < 1.0 - clip.low)
    bound = torch.where(above, 1.0 + clip.high, 1.0 - clip.low)
    stopped = above | below
    if clip.dual is not None:
        beyond = bad & (seen > clip.dual)
        bound, stopped = torch.where(beyond, clip.dual, bound), stopped | beyond
    return Surrogate(-torch.where(stopped, bound, ratio) * advantages, seen, stopped)


CLIPPED = (
    Loss("grpo", clipped_by_token, "sequence", Clip(0.2, 0.2)),
    Loss("dr_grpo", clipped_by_token, "constant", Clip(0.2, 0.2)),
    Loss("dapo", clipped_by_token, "token", Clip(0.2, 0.28)),
    Loss("gspo", clipped_by_sequence, "sequence", Clip(3e-4, 4e-4), holds_fixed=True, needs_whole=True),
    # No lower bound, as in the paper. 4 above is TRL's epsilon_high = 5, which bounds r itself.
    Loss("cispo", weighed_by_ratio, "token", Clip(1.0, 4.0), holds_fixed=True),
    Loss("reinforce", policy_gradient, "sum", Clip(0.2, 0.2)),
)

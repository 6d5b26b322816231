"""Importance weights of tokens that were sampled from another policy than the one whose ratio is clipped.

The engine's logprobs of its own samples are off by rounding, by other kernels, or by versions. With `old_logprobs =
"recompute"` the ratio is taken against the trainer's own logprobs, and what is left, rho = exp(old - rollout), is a weight
on each token's loss, without gradient. Of tokens that were sampled with top_p, top_k or min_p, both logprobs are renormalised over the
tokens that were kept. Against the whole distribution, the mean of rho would be the mass that was kept, not 1. Sequences without
logprobs have weight 1.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from atropos_trainer_grpo.losses import Rows, bounded_exp
from atropos_trainer_grpo.losses.kpop import agree

if TYPE_CHECKING:
    from atropos_trainer_grpo.config import Correction


BY_SEQUENCE = ("sequence_tis", "sequence_mis", "geometric_mis")  # need a sequence's rows in one micro-batch


class Weights(NamedTuple):
    """Per row [R], no gradient."""

    values: Tensor
    touched: Tensor  # bool: truncated, or masked out


def importance_weights(
    kind: Correction, rows: Rows, rollout: Tensor, known: Tensor, low: float, high: float
) -> Weights:
    """`rollout` [R] are the engine's logprobs; rho is 1 for those that are not `known` [R]. With rho = exp(old - rollout):

    - tis: min(rho, high), truncated importance sampling (Yao et al. 2025; Ionides 2008).
    - mis, icepop: rho where low <= rho <= high, else 0 (IcePop, Ling Team 2025, with its bounds 0.5 and 5).
    - kpop: rho where old and rollout agree to `high` nats, else 0 (`losses.kpop`).
    - sequence_tis, sequence_mis: the same of the product of rho over each sequence.
    - geometric_mis: 1 if low <= the geometric mean of rho over the sequence <= high, else 0: whole sequences are left
      out, none is weighted.
    """
    log_ratio = torch.where(known, rows.old - rollout, 0.0).detach()
    if kind in ("sequence_tis", "sequence_mis"):
        log_ratio = rows.sum_by_sequence(log_ratio)
    elif kind == "geometric_mis":
        log_ratio = rows.sum_by_sequence(log_ratio) / rows.sum_by_sequence(known.to(log_ratio.dtype)).clamp(min=1.0)
    ratio = bounded_exp(log_ratio)
    if kind in ("tis", "sequence_tis"):
        return Weights(ratio.clamp(max=high), ratio > high)
    if kind == "kpop":
        outside = known & ~agree(rows.old, rollout, high)
    else:
        outside = (ratio < low) | (ratio > high)
    kept = torch.ones_like(ratio) if kind == "geometric_mis" else ratio
    return Weights(torch.where(outside, 0.0, kept), outside)

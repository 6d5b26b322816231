"""KPop: tokens whose probability two policies disagree about are left out ("Taming Training-Inference Mismatch in Reinforcement
Learning with Adaptive Masking Regions", Guo et al. 2026, ringtech.notion.site/kpop).

A token against everything else is a coin, which comes up with p in one policy and with q in the other. The token is kept if
the divergence D(p||q) = p log(p/q) + (1 - p) log((1 - p) / (1 - q)) is within a threshold both ways. So the ratio may be large
if p is small, but not if p is nearly 1; IcePop's bounds on the ratio are the same for both.
"""

from __future__ import annotations

import torch
from torch import Tensor

from atropos_trainer_grpo.losses.rows import FURTHEST, Clip, Loss, Rows, Surrogate

NEAREST = 1e-6  # to certainty: beyond it 1 - p has few digits left in float32


def agree(one: Tensor, other: Tensor, threshold: float) -> Tensor:
    """[R] bool: the coins of these logprobs [R] are within `threshold` nats of each other, both ways."""
    one, other = one.detach(), other.detach()
    return torch.maximum(coin_divergence(one, other), coin_divergence(other, one)) <= threshold


def coin_divergence(p: Tensor, q: Tensor) -> Tensor:
    """[R]: D(p||q) in nats, of the coins of these logprobs [R]. Neither comes nearer to certainty than float32 can tell."""
    p, q = (logs.clamp(-FURTHEST, -NEAREST) for logs in (p, q))
    not_p, not_q = -torch.expm1(p), -torch.expm1(q)
    return p.exp() * (p - q) + not_p * (not_p.log() - not_q.log())


def left_out_by_divergence(rows: Rows, clip: Clip, threshold: float = 0.1) -> Surrogate:
    """Return -r A for tokens at which p_new and p_old agree to `threshold`, else 0; the bounds in `clip` are not used. As a
    separate loss KPop is prime-rl's `kpop` without the KL term that prime-rl adds. As a weight on another loss it is AReaL's,
    which is `correction.kind = "kpop"` here."""
    kept, ratio = agree(rows.logprobs, rows.old, threshold), rows.ratio()
    return Surrogate(-torch.where(kept, ratio, 0.0) * rows.advantages, ratio.detach(), ~kept)


KPOP = Loss("kpop", left_out_by_divergence, "token", Clip(0.2, 0.2))

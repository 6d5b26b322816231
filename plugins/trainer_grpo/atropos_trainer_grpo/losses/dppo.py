"""DPPO: a token is left out once the policy has moved too far, measured by a divergence and not by its ratio ("Rethinking the
Trust Region in LLM Reinforcement Learning", arXiv 2602.04879, eq. 11).

The divergence is that of two coins, the sampled token against all others, with p in the policy and q in the one that sampled:
|p - q| (binary TV, eq. 13) or q log(q/p) + (1 - q) log((1 - q) / (1 - p)) (binary KL, eq. 14). A token is left out only if
the update would move it further away: A > 0 and p > q, or A < 0 and p < q. The paper compares with the policy that sampled, so
`old_logprobs = "rollout"` is its setting.
"""

from __future__ import annotations

import torch
from torch import Tensor

from atropos_trainer_grpo.losses.kpop import coin_divergence
from atropos_trainer_grpo.losses.rows import Clip, Loss, Rows, Surrogate

THRESHOLDS = {"tv": 0.2, "kl": 0.05}  # prime-rl's and open-instruct's defaults


def left_out_by_movement(
    rows: Rows,
    clip: Clip,
    divergence: str = "tv",
    threshold_pos: float | None = None,
    threshold_neg: float | None = None,
) -> Surrogate:
    """Return -r A for tokens within the thresholds, else 0; the bounds in `clip` are not used. `threshold_pos` is for A > 0,
    `threshold_neg` for A < 0. The ratio is not bounded; the authors' code bounds it at 10."""
    new, old = rows.logprobs.detach(), rows.old
    apart = _apart(divergence, new, old)
    high, low = (THRESHOLDS[divergence] if given is None else given for given in (threshold_pos, threshold_neg))
    further_up = (rows.advantages > 0) & (new > old) & (apart > high)
    further_down = (rows.advantages < 0) & (new < old) & (apart > low)
    left_out, ratio = further_up | further_down, rows.ratio()
    return Surrogate(-torch.where(left_out, 0.0, ratio) * rows.advantages, ratio.detach(), left_out)


def _apart(divergence: str, new: Tensor, old: Tensor) -> Tensor:
    if divergence == "kl":
        return coin_divergence(old, new)
    return (new.clamp(max=0.0).exp() - old.clamp(max=0.0).exp()).abs()


DPPO = Loss("dppo", left_out_by_movement, "token", Clip(0.2, 0.2))

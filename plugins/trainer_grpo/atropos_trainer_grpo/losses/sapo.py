"""SAPO: a soft gate on the ratio in place of a clip (Soft Adaptive Policy Optimization, arXiv 2511.20347, eq. 5 and 6)."""

from __future__ import annotations

import torch

from atropos_trainer_grpo.losses.rows import Clip, Loss, Rows, Surrogate


def gated_softly(rows: Rows, clip: Clip, temperature_pos: float = 1.0, temperature_neg: float = 1.05) -> Surrogate:
    """-f(r) A with f(r) = 4 / tau * sigmoid(tau (r - 1)), and tau by the sign of A: `temperature_pos` where A > 0,
    `temperature_neg` elsewhere. Its gradient is that of -w A log p with w = 4 sigmoid(x) sigmoid(-x) r, x = tau (r - 1): 1 at
    r = 1, and fading on either side of it, the faster the larger tau is. TRL's `sapo`; no bound of `clip` is looked at."""
    ratio, moving = rows.ratio().detach(), rows.logprobs - rows.logprobs.detach()
    temperature = torch.full_like(ratio, temperature_neg).masked_fill(rows.advantages > 0, temperature_pos)
    reached = temperature * (ratio - 1.0)
    gate = torch.sigmoid(reached) * 4.0 / temperature
    # By hand: autograd's p (1 - p) is 0 in float32 from x = 17 on.
    weight = 4.0 * torch.sigmoid(reached) * (torch.sigmoid(-reached) * ratio)
    return Surrogate(-(gate + weight * moving) * rows.advantages, ratio, weight=weight)


SAPO = Loss("sapo", gated_softly, "sequence", Clip(0.2, 0.2))

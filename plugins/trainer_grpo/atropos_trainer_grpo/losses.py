"""The losses, as pure functions of packed columns.

Every loss here is `sum_t w_t * l_t` over the trained tokens of a minibatch: `token_weights` gives w and says how the
losses differ, `clipped_surrogate` gives l. The weights are computed over the whole minibatch before it is split, so
that any split into micro-batches adds up to the same loss and the same gradient.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from atropos_core.types import Bools, Floats

if TYPE_CHECKING:
    from atropos_trainer_grpo.config import Loss


def token_weights(loss: Loss, trained: Bools, offsets: NDArray[np.int64], loss_length: int | None = None) -> Floats:
    """Per token w: f32[N], 0 where not trained. S counts the sequences that have a trained token, |o_i| those tokens.

    - grpo: 1 / (S |o_i|), the mean over a sequence, then over sequences (arXiv 2402.03300, eq. 3; without its KL term).
    - dr_grpo: 1 / (S L) with L = `loss_length`: the token sum over a constant length (arXiv 2503.20783, section 3.2).
      This is TRL's convention, B * L_max; verl's seq-mean-token-sum-norm divides by L alone.
    - dapo: 1 / sum_i |o_i|, the mean over all tokens of the minibatch (arXiv 2503.14476, eq. 8).
    """
    counts = np.add.reduceat(trained.astype(np.int64), offsets[:-1]) if len(trained) else np.zeros(0, np.int64)  # [S]
    sequences = max(int((counts > 0).sum()), 1)
    if loss == "grpo":
        each = 1.0 / (sequences * np.maximum(counts, 1))
    elif loss == "dr_grpo":
        assert loss_length is not None, "the options see to it"
        each = np.full(len(counts), 1.0 / (sequences * loss_length))
    else:
        each = np.full(len(counts), 1.0 / max(int(counts.sum()), 1))
    weights = np.repeat(each, np.diff(offsets)) * trained
    return weights.astype(np.float32)


def clipped_surrogate(
    log_ratio: Tensor, advantages: Tensor, weights: Tensor, clip_low: float, clip_high: float
) -> tuple[Tensor, Tensor, Tensor]:
    """-sum w min(r A, clip(r, 1 - clip_low, 1 + clip_high) A) with r = exp(log_ratio), for either sign of A
    (arXiv 1707.06347, eq. 7). All arguments are [R].

    Returns the loss, r without gradient, and where the clip took the gradient away.
    """
    ratio = log_ratio.exp()
    free = ratio * advantages
    bound = ratio.detach().clamp(1.0 - clip_low, 1.0 + clip_high) * advantages
    clipped = bound < free.detach()
    loss = -(torch.where(clipped, bound, free) * weights).sum()
    return loss, ratio.detach(), clipped

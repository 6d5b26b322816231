"""How the losses of tokens add up to that of a minibatch."""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import NDArray

from atropos_core.types import Bools, Floats

Average = Literal["sequence", "token", "constant", "sum"]


def token_weights(
    average: Average, trained: Bools, offsets: NDArray[np.int64], loss_length: int | None = None
) -> Floats:
    """Per token w: f32[N], 0 where not trained. `offsets` [S + 1] are those of whole episodes, which count once each however
    many rollouts they are in. S counts the sequences that have a trained token, |o_i| those tokens.

    - sequence: 1 / (S |o_i|), the mean over a sequence, then over sequences (GRPO, arXiv 2402.03300, eq. 3).
    - token: 1 / sum_i |o_i|, the mean over all tokens of the minibatch (DAPO, arXiv 2503.14476, eq. 8).
    - constant: 1 / (S L) with L = `loss_length`, the token sum over a constant length (Dr.GRPO, arXiv 2503.20783, section
      3.2). TRL's B * L_max and verl's seq-mean-token-sum-norm are the same; verl before 0.7.1 divides by L only.
    - sum: 1 / S, the token sum, then the mean over sequences: the policy gradient as it is derived (REINFORCE, RLOO).
    """
    counts = np.add.reduceat(trained.astype(np.int64), offsets[:-1])  # [S]
    sequences = max(int((counts > 0).sum()), 1)
    if average == "sequence":
        each = 1.0 / (sequences * np.maximum(counts, 1))
    elif average == "token":
        each = np.full(len(counts), 1.0 / max(int(counts.sum()), 1))
    elif average == "constant":
        assert loss_length is not None, "the options see to it"
        each = np.full(len(counts), 1.0 / (sequences * loss_length))
    else:
        each = np.full(len(counts), 1.0 / sequences)
    weights = np.repeat(each, np.diff(offsets)) * trained
    return weights.astype(np.float32)

"""Change a batch's advantages: the KL penalty of a reward, and whitening (REINFORCE++)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from atropos_core.advantages import is_noise
from atropos_core.types import Bools, Floats


def with_divergence(
    advantages: Floats, divergence: Floats, trained: Bools, offsets: NDArray[np.int64], coefficient: float
) -> NDArray[np.float64]:
    """A_t - coefficient * sum over s >= t of divergence_s, over the trained tokens of each episode: the return where every
    token's reward is -coefficient * k1 and nothing is discounted (REINFORCE++, arXiv 2501.03262, eq. 4). All [N], but for
    `offsets` [E + 1], the episodes'. In float64, since whitening may take a mean from them that is much larger than what is left."""
    penalty = np.where(trained, divergence, 0.0).astype(np.float64)
    upto = np.concatenate([[0.0], np.cumsum(penalty)])  # [N + 1]
    ahead = np.repeat(upto[offsets[1:]], np.diff(offsets)) - upto[:-1]
    return np.where(trained, advantages - coefficient * ahead, 0.0)


def whitened(advantages: Floats | NDArray[np.float64], trained: Bools) -> Floats:
    """Return (A - mean) / std over all trained tokens of the batch [N], with a Bessel-corrected standard deviation as in
    verl's masked whitening. Exactly 0 if the advantages are equal up to noise."""
    values = advantages[trained].astype(np.float64)
    made = np.zeros(len(advantages), np.float32)
    if len(values) < 2:
        return made
    deviation = values.std(ddof=1)
    if not is_noise(float(deviation), float(np.abs(values).max())):
        made[trained] = (values - values.mean()) / deviation
    return made

"""The tokens that the sampler kept (`top_p`, `top_k`, `min_p`), in the trainer: a token's distribution is renormalised over them.

With S the kept tokens of a position, mu(a) = pi(a) / sum over b in S of pi(b) for a in S is what the token was sampled from. The
update moves pi with S held fixed, as "Keep Sampling Mask" does (DeepSeek-V3.2, arXiv:2512.02556, 3.1): logits outside S are minus
infinity. So logprobs, ratios, entropy and their gradients are of the truncated distribution, and the logits outside S get none.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from atropos_core.types import KEPT, Batch


class KeptRows(NamedTuple):
    """The tokens kept at each of R scored rows. A row without kept tokens has its whole distribution."""

    offsets: list[int]  # [R + 1] on the host
    rows: Tensor  # i64[K] the row of each kept token
    token_ids: Tensor  # i64[K]
    cut: Tensor  # bool[R] the row has kept tokens

    def outside(self, part: slice, vocabulary: int) -> Tensor | None:
        """Return a mask [r, V] of the tokens that were not kept at the rows of this part; None if none of these rows was cut."""
        begin, end = part.start, min(part.stop, len(self.cut))
        first, last = self.offsets[begin], self.offsets[end]
        if first == last:
            return None
        mask = self.cut[begin:end, None].repeat(1, vocabulary)
        mask[self.rows[first:last] - begin, self.token_ids[first:last]] = False
        return mask


def kept_rows(batch: Batch, positions: NDArray[np.int64], device: str) -> KeptRows | None:
    """Return what was kept at these tokens [R] of the batch; None if nothing was cut at any of them."""
    column = batch.ragged.get(KEPT)
    if column is None:
        return None
    selected = column.select(positions)
    if not len(selected.values):
        return None
    sizes = np.diff(selected.offsets)

    def tensor(values: NDArray[np.generic]) -> Tensor:
        return torch.from_numpy(values).to(device, non_blocking=True)

    return KeptRows(
        selected.offsets.tolist(),
        tensor(np.repeat(np.arange(len(sizes)), sizes)),
        tensor(selected.values.astype(np.int64)),
        tensor(sizes > 0),
    )


def renormalise_(logprobs: Tensor, outside: Tensor) -> Tensor:
    """Renormalise logprobs [r, V] over the tokens that are not `outside`, in place. Returns the mass [r] that those had."""
    mass = logprobs.masked_fill_(outside, -torch.inf).logsumexp(dim=1)
    logprobs.sub_(mass[:, None])
    return mass.exp_()

"""Random rows to try a loss on: float64, of sequences of 1 to 12 tokens, ratios between about 0.3 and 3, advantages of either sign."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from atropos_trainer_grpo.losses import Clip, Loss, Rows, token_weights

LENGTH = 16  # for losses that average over a constant length


class Case:
    """Random rows, with the weights that the trainer would give them."""

    def __init__(self, loss: Loss, seed: int) -> None:
        random = np.random.default_rng(seed)
        self.loss = loss
        self.lengths = random.integers(1, 13, 6)
        total = int(self.lengths.sum())
        self.logprobs, self.old = random.normal(-2, 0.4, total), random.normal(-2, 0.4, total)
        self.advantages = np.repeat(random.normal(size=6), self.lengths)
        offsets = np.concatenate([[0], np.cumsum(self.lengths)])
        self.weights = token_weights(loss.average, np.ones(total, np.bool_), offsets, LENGTH).astype(np.float64)
        self.parts = [np.arange(first, last) for first, last in pairwise(offsets)]

    def rows(self, chosen: Sequence[int] | None = None) -> tuple[Rows, Tensor]:
        """The rows of the chosen sequences in that order, with their weights."""
        parts = [self.parts[i] for i in (range(len(self.parts)) if chosen is None else chosen)]
        at = np.concatenate(parts)
        rows = Rows(
            logprobs=torch.tensor(self.logprobs[at], requires_grad=True),
            old=torch.tensor(self.old[at]),
            advantages=torch.tensor(self.advantages[at]),
            sequence=torch.from_numpy(np.repeat(np.arange(len(parts)), [len(part) for part in parts])),
        )
        return rows, torch.tensor(self.weights[at])

    def ask(self, chosen: Sequence[int] | None = None, clip: Clip | None = None) -> tuple[float, np.ndarray]:
        """Return the value, and the gradient [R] at each token's place in this case (0 for tokens that were not chosen)."""
        rows, weights = self.rows(chosen)
        total = (self.loss(rows, clip or self.loss.clip).values * weights).sum()
        total.backward()
        gradient = np.zeros(len(self.logprobs))
        at = np.concatenate([self.parts[i] for i in (range(len(self.parts)) if chosen is None else chosen)])
        assert rows.logprobs.grad is not None
        gradient[at] = rows.logprobs.grad.numpy()
        return float(total.detach()), gradient


def uses_bound(loss: Loss, bound: str) -> bool:
    """True if a bound of the clip ("low", "high", "dual") changes the loss."""
    tight, wide = {"low": (0.0, 0.9), "high": (0.0, 5.0), "dual": (1.01, 100.0)}[bound]
    case = Case(loss, 0)
    (one, gradient), (other, slopes) = (case.ask(clip=loss.clip._replace(**{bound: at})) for at in (tight, wide))
    return one != other or bool((gradient != slopes).any())

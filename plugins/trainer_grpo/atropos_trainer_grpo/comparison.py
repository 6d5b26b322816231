"""Compare the senders' logprobs with the trainer's own: `alignment/*` (`atropos_core.health.alignment`)."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from atropos_core.health.alignment import compare
from atropos_core.types import Bools, Floats, Metrics
from atropos_trainer_grpo.columns import token_positions
from atropos_trainer_grpo.forward_passes import ForwardPasses, Indices
from atropos_trainer_grpo.logprobs import Scored

SAMPLE = 1 / 16  # of the tokens that the update would score too late: these are scored once more


class Comparison:
    """A comparison by the first forward pass over each token whose sender gave a logprob."""

    def __init__(self, passes: ForwardPasses) -> None:
        count = len(passes.batch.tokens)
        self._passes = passes
        self._compared = np.zeros(count, np.bool_)  # [N] some rank has the trainer's logprob
        self._exact = np.zeros(count, np.bool_)  # [N] and it is of the weights before the first step
        self._recomputed = np.zeros(count, np.float32)  # [N] logprobs that all ranks have
        self.before_update: dict[
            str, Floats
        ] = {}  # [N] after `metrics`: NaN where not of the weights before the first step
        self._scored: list[
            tuple[Indices, Tensor]
        ] = []  # positions [R], logprobs and entropies [2, R], on this rank's device

    def note(self, positions: Indices, scored: Scored) -> None:
        """Keep the first logprobs of these tokens."""
        new = self._passes.columns.claimed[positions] & ~self._compared[positions]
        both = torch.stack([scored.logprobs, scored.entropy]).detach()
        if new.all():
            self._scored.append((positions, both))
        elif new.any():
            self._scored.append((positions[new], both[:, self._passes.tensor(np.flatnonzero(new))]))

    def mark(self, sequences: Indices, *, exact: bool) -> None:
        """Mark these sequences as scored, on any rank."""
        at = token_positions(self._passes.batch.offsets, sequences)
        new = at[self._passes.columns.claimed[at] & ~self._compared[at]]
        self._compared[new] = True
        self._exact[new] = exact

    def take(self, there: Bools, logprobs: Floats) -> None:
        """Take logprobs [N] of the weights before the first step; all ranks have those with `there` set."""
        new = there & self._passes.columns.claimed & ~self._compared
        self._recomputed = np.where(new, logprobs, self._recomputed)
        self._compared |= new
        self._exact |= new

    @torch.no_grad()
    def look_ahead(self, first: Indices, draw: np.random.Generator, *, dropouts: bool) -> None:
        """Make extra passes before any step. They score the first minibatch, if dropout would make another network of it, and a sample
        of the later ones, whose own forward passes use weights that have moved."""
        batch = self._passes.batch
        unknown = np.logical_or.reduceat(self._passes.columns.claimed & ~self._compared, batch.offsets[:-1])
        drawn = draw.permutation(np.setdiff1d(np.flatnonzero(unknown), first))
        before = np.cumsum(batch.lengths[drawn]) - batch.lengths[drawn]
        looked = drawn[before < SAMPLE * len(batch.tokens)]
        if dropouts:
            looked = np.concatenate([first[unknown[first]], looked])
        for scored, positions in self._passes.over(np.sort(looked)):
            self.note(positions, scored)
        self.mark(looked, exact=True)

    def metrics(self) -> Metrics:
        """Collective."""
        own = np.zeros((3, len(self._recomputed)), np.float32)  # logprob, entropy, and 1 if there is one
        for positions, both in self._scored:
            own[:2, positions] = both.float().cpu().numpy()
            own[2, positions] = 1
        logprobs, entropy, there = self._passes.group.sum_array(own)
        entropy = np.where(there > 0, entropy, np.float32(np.nan))
        logprobs = logprobs + self._recomputed
        exact = self._compared & self._exact
        self.before_update = {
            "trainer_logprobs": np.where(exact, logprobs, np.float32(np.nan)),
            "entropy": np.where(exact, entropy, np.float32(np.nan)),
        }
        return compare(self._passes.batch, logprobs, self._compared, self._exact, entropy)

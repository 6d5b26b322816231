"""The inputs of the loss for each token of a batch: old policy, reference, advantage, teacher."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

import numpy as np
import torch

from atropos_core.errors import DataError
from atropos_core.types import Bools, Floats
from atropos_trainer_grpo.comparison import Comparison
from atropos_trainer_grpo.distillation import Taught
from atropos_trainer_grpo.forward_passes import ForwardPasses
from atropos_trainer_grpo.whitening import whitened, with_divergence

if TYPE_CHECKING:
    from atropos_trainer_grpo.config import DistillationOptions, GrpoOptions

Reference = Callable[[], AbstractContextManager[torch.nn.Module]]  # the reference model of KL


class Targets:
    """Targets by token of the batch, [N] each; complete after `prepare`."""

    def __init__(self, passes: ForwardPasses, options: GrpoOptions, taught: Taught | None) -> None:
        batch, columns = passes.batch, passes.columns
        self.old = batch.logprobs  # valid if `has_old`
        self.has_old = columns.from_rollout
        self.reference: Floats | None = None  # valid for trained tokens
        self.advantages = batch.advantages
        self.taught = taught
        self.learns = np.zeros(len(batch.tokens), np.bool_)  # a trained token that the teacher scored
        self.behind = np.zeros(len(batch.tokens), np.float32)  # teacher's - policy's logprob, in reverse
        if taught is not None:
            self.learns = columns.trained & (taught.counts > 0) & ~columns.cut  # teachers have the whole distribution
        self._passes = passes
        self._options = options

    @property
    def forward_kl(self) -> DistillationOptions | None:
        """The distillation options, if the teacher's part is a separate loss instead of an advantage."""
        options = self._options.distillation
        return options if options is not None and options.kind == "forward" else None

    def prepare(self, comparison: Comparison, reference: Reference | None, *, dropouts: bool) -> None:
        """Score the whole batch once before any update: old and reference logprobs, and the advantages that are trained.
        Collective."""
        options, columns, batch = self._options, self._passes.columns, self._passes.batch
        in_reward = options.kl is not None and options.kl.place == "reward"
        # With a single update, its own forward pass would do, unless dropout makes another network of it.
        if options.epochs * options.minibatches > 1 or in_reward or dropouts:
            self._recompute_old(comparison)
        if options.kl is not None:
            self._compute_reference(reference)
        if in_reward:
            assert options.kl is not None and self.reference is not None
            offsets = self._passes.episodes.token_offsets(np.arange(batch.sequences))
            paid = with_divergence(
                self.advantages, self.old - self.reference, columns.trained, offsets, options.kl.coefficient
            )
            self.advantages = whitened(paid, columns.trained) if options.whiten_advantages else paid.astype(np.float32)
        elif options.whiten_advantages:
            self.advantages = whitened(self.advantages, columns.trained)
        if options.distillation is not None and options.distillation.kind == "reverse":
            self._learn_in_reverse(options.distillation, comparison)

    def moving(self, *, whole: bool) -> Bools:
        """[S] True if a token's loss has a gradient; with `whole`, if that holds for any sequence of its episode."""
        kl = self._options.kl
        pulled = (kl is not None and kl.place == "loss") or self._options.entropy_coefficient
        forward = self.forward_kl
        rewarded = (self.advantages != 0) & (forward is None or not forward.alone)
        moving = self._passes.columns.trained & (rewarded | bool(pulled))
        if forward is not None:
            moving |= self.learns
        by_sequence: Bools = np.logical_or.reduceat(moving, self._passes.batch.offsets[:-1])
        return self._passes.episodes.any(by_sequence) if whole else by_sequence

    def _recompute_old(self, comparison: Comparison) -> None:
        """Compute the denominator of the ratio, if it is not the engine's logprobs."""
        columns = self._passes.columns
        wanting = columns.trained & ~columns.from_rollout
        self.old = self._passes.computed(wanting, self._passes.batch.logprobs)
        self.has_old = columns.trained
        comparison.take(wanting, self.old)

    def _compute_reference(self, reference: Reference | None) -> None:
        batch = self._passes.batch
        given = batch.columns.get("ref_logprobs")
        wanting, known = self._passes.columns.trained, np.zeros(len(batch.tokens), np.float32)
        if given is not None:
            # A sender's logprobs are of the whole distribution. KL compares the two over the kept tokens only, so these are computed.
            wanting, known = wanting & ~(given.present & ~self._passes.columns.cut), given.values
        if not wanting.any():
            self.reference = known
            return
        assert reference is not None, "the trainer gives one if the options set a KL"
        with reference() as model:
            self.reference = self._passes.computed(wanting, known, model)

    def _learn_in_reverse(self, options: DistillationOptions, comparison: Comparison) -> None:
        """Add the teacher's score of each sampled token to its advantage: on-policy distillation."""
        assert self.taught is not None, "the options ask for it"
        own, known = self.taught.of_own(self._passes.batch.tokens)
        self.learns = self._passes.columns.trained & known & ~self._passes.columns.cut
        if len(self.taught.token_ids) and not self.learns.any():
            raise DataError(
                'trainer.distillation.kind = "reverse" needs the teacher\'s logprobs of the sampled tokens, but the teacher sent none '
                "of them.",
                remedy='Have the teacher send the sampled token with its likeliest ones, or set kind = "forward".',
            )
        if (self.learns & ~self.has_old).any():
            self._recompute_old(comparison)
        self.behind = np.where(self.learns, own - self.old, 0).astype(np.float32)
        rest = np.zeros_like(self.advantages) if options.alone else self.advantages
        self.advantages = rest + np.float32(options.weight) * self.behind

"""Turn one batch into updates: the sequences of each optimiser step, its gradient, and its metrics.

Nothing here waits for the device between the first forward and the last backward pass of a minibatch.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from atropos_core.types import Batch, Bools, Floats, Metrics
from atropos_trainer_grpo.columns import token_positions
from atropos_trainer_grpo.comparison import Comparison
from atropos_trainer_grpo.corrections import BY_SEQUENCE, importance_weights
from atropos_trainer_grpo.distillation import Taught, forward_kl
from atropos_trainer_grpo.episodes import beside_order
from atropos_trainer_grpo.forward_passes import ForwardPasses, Indices
from atropos_trainer_grpo.kl_estimators import divergence
from atropos_trainer_grpo.logprobs import Scored
from atropos_trainer_grpo.loss_inputs import Reference, Targets
from atropos_trainer_grpo.losses import Clip, Loss, Rows, token_weights
from atropos_trainer_grpo.model import vocabulary_of
from atropos_trainer_grpo.non_finite import Evidence, against_old, against_reference
from atropos_trainer_grpo.optimizer import Optimizer
from atropos_trainer_grpo.process_group import ALONE, ProcessGroup, full
from atropos_trainer_grpo.tally import Tally

if TYPE_CHECKING:
    from atropos_trainer_grpo.config import GrpoOptions


class Update:
    """The work on one batch. `backward` and `write` alternate, once for each of `minibatches()`."""

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: Optimizer,
        options: GrpoOptions,
        loss: Loss,
        batch: Batch,
        device: str,
        seed: int,
        dropouts: Sequence[torch.nn.Module] = (),  # layers to switch on while gradients are computed
        reference: Reference | None = None,
        group: ProcessGroup = ALONE,
    ) -> None:
        # Inputs.
        self._given = batch
        self._optimizer = optimizer
        self._options = options
        self._loss = loss
        self._clip = clip_of(options, loss)
        self._needs_whole = loss.needs_whole or (
            options.correction is not None and options.correction.kind in BY_SEQUENCE
        )  # episodes in one micro-batch
        self._seed = seed
        self._dropouts = dropouts
        self._reference = reference
        # The state of this update.
        self._passes = ForwardPasses(model, batch, options, device, group)
        taught = Taught.of(self._passes.batch, vocabulary_of(model)) if options.distillation is not None else None
        self._targets = Targets(self._passes, options, taught)
        self._comparison = Comparison(self._passes)
        self._norm = torch.zeros(())  # of the gradient that `write` will use
        self.tally = Tally()

    def minibatches(self) -> Iterator[Indices]:
        """Yield the sequence numbers of every optimiser step. Groups stay together, in an order drawn from seed and version.
        A step that ends within a group ends between two episodes."""
        batch, episodes = self._passes.batch, self._passes.episodes
        groups, members = np.unique(batch.group, return_inverse=True)
        for epoch in range(self._options.epochs):
            place = np.arange(len(groups))
            if self._options.minibatches > 1:
                place = np.random.default_rng([self._seed, batch.version, epoch]).permutation(place)
            order = np.argsort(place[members][episodes.first], kind="stable")
            parts = np.array_split(order, self._options.minibatches)
            yield from (episodes.sequences(part) for part in parts if len(part))

    def backward(self, minibatch: Indices) -> None:
        """Leave the gradient of the minibatch's loss in the parameters. Raises TrainingDiverged, with no gradient left,
        if the loss or an entry of the gradient is not finite."""
        first = not self.tally.losses
        if first:
            self._prepare(minibatch)
        self._optimizer.clear()
        loss = self._accumulate(minibatch)
        if not self._dropouts:
            self._comparison.mark(minibatch, exact=first)
        self._norm = full(self._optimizer.gradient_norm())
        summed = self._passes.group.sum(torch.stack([*loss, torch.zeros_like(self._norm)]).sum())
        total, norm = torch.stack([summed, self._norm]).tolist()
        if math.isfinite(total) and not math.isfinite(norm):
            norm, self._norm = self._optimizer.scale_down()
        if not (math.isfinite(total) and math.isfinite(norm)):
            self._optimizer.clear()
            step = f"batch {self._passes.batch.version}, optimiser step {len(self.tally.losses) + 1}"
            raise self._evidence(minibatch).error(f"{step}: loss {total:g}, gradient norm {norm:g}.")
        self.tally.losses.append(total)
        self.tally.norms.append(norm)

    def write(self) -> None:
        """Take the optimiser step: parameters change only here."""
        began = time.perf_counter()
        self.tally.rates.append(self._optimizer.learning_rate)
        self._optimizer.step(self._norm)
        self.tally.seconds["optimizer"] += time.perf_counter() - began

    def metrics(self) -> Metrics:
        """Means over all optimiser steps. Collective."""
        return {
            **self.tally.means(self._passes.group, taught=self._targets.taught is not None),
            **self._comparison.metrics(),
            "tokens": float(self._passes.columns.trained.sum()),
            **{f"time/{name}_s": seconds for name, seconds in self.tally.seconds.items()},
        }

    def token_values(self) -> dict[str, Floats]:
        """Return the values of Trainer.token_values, [N] in the order of the given batch. Call after `metrics`."""
        values = {"advantages": self._targets.advantages, **self._comparison.before_update}
        if self._passes.batch is self._given:
            return values
        at = token_positions(self._given.offsets, beside_order(self._given))
        back = np.argsort(at)
        return {name: column[back] for name, column in values.items()}

    def _prepare(self, minibatch: Indices) -> None:
        """Prepare targets before the first step, whose minibatch this is."""
        batch, dropouts = self._passes.batch, bool(self._dropouts)
        self._targets.prepare(self._comparison, self._reference, dropouts=dropouts)
        if dropouts or len(minibatch) < batch.sequences:
            draw = np.random.default_rng([self._seed, batch.version, self._options.epochs])
            self._comparison.look_ahead(minibatch, draw, dropouts=dropouts)

    def _accumulate(self, minibatch: Indices) -> list[Tensor]:
        """Add up the gradient, and return the loss of each micro-batch that has one."""
        weights = self._weights(minibatch, self._passes.columns.trained)
        learning = self._weights(minibatch, self._targets.learns)
        losses = []
        moving = self._targets.moving(whole=self._needs_whole)[minibatch]
        for sequences, active in ((minibatch[moving], True), (minibatch[~moving], False)):
            for part in self._passes.parts(sequences, whole=self._needs_whole):
                began = time.perf_counter()
                # Sequences without a gradient are only measured.
                with dropping(self._dropouts if active else ()), torch.set_grad_enabled(active):
                    if len(part):
                        scored, positions = self._passes.score(part, taught=self._teacher_of(part) if active else None)
                        loss = self._total(scored, positions, weights, learning)
                        if not self._dropouts:
                            self._comparison.note(positions, scored)
                    else:
                        loss = self._passes.score_empty()
                    between = time.perf_counter()
                    self.tally.seconds["forward"] += between - began
                    if active:
                        loss.backward()
                        losses.append(loss.detach())
                        self.tally.seconds["backward"] += time.perf_counter() - between
        return losses

    def _weights(self, minibatch: Indices, mask: Bools) -> Floats:
        """[N] each token's weight in the minibatch's loss, valid if `mask`."""
        batch, options = self._passes.batch, self._options
        at = token_positions(batch.offsets, minibatch)
        offsets = self._passes.episodes.token_offsets(minibatch)
        weights = np.zeros(len(batch.tokens), dtype=np.float32)
        weights[at] = token_weights(options.average or self._loss.average, mask[at], offsets, options.loss_length)
        return weights

    def _teacher_of(self, sequences: Indices) -> Taught | None:
        """The teacher's scores of these sequences, if the loss needs them."""
        at = token_positions(self._passes.batch.offsets, sequences)
        return self._targets.taught if self._targets.forward_kl is not None and self._targets.learns[at].any() else None

    def _total(self, scored: Scored, positions: Indices, weights: Floats, learning: Floats) -> Tensor:
        """The loss of the trained tokens among those scored. `weights` and `learning` [N] are the token weights of the
        policy's loss and of the teacher's."""
        options, columns, targets, tensor = self._options, self._passes.columns, self._targets, self._passes.tensor
        distilled = self._distilled(scored, positions, learning)
        trained = np.flatnonzero(columns.trained[positions])
        new, entropy, mass = scored.logprobs, scored.entropy, scored.mass
        if len(trained) < len(positions):
            counted = tensor(trained)
            positions, new, entropy = positions[trained], new[counted], entropy[counted]
            mass = None if mass is None else mass[counted]
        rows = Rows(
            logprobs=new,
            old=torch.where(tensor(targets.has_old[positions]), tensor(targets.old[positions]), new.detach()),
            advantages=tensor(targets.advantages[positions]),
            sequence=tensor(self._passes.episodes.counted(self._passes.owner[positions])),
        )
        known, rollout = tensor(columns.claimed[positions]), tensor(self._passes.batch.logprobs[positions])
        surrogate = self._loss(rows, self._clip)
        values, sums = surrogate.values, {"ratio": surrogate.ratio.sum()}
        if targets.forward_kl is not None and targets.forward_kl.alone:
            values = torch.zeros_like(values)
        if surrogate.clipped is not None:
            sums["clipped"] = surrogate.clipped.sum()
        if surrogate.weight is not None:
            sums["weight"] = surrogate.weight.sum()
        if options.correction is not None:
            correction = importance_weights(options.correction.kind, rows, rollout, known, *options.correction.bounds)
            values = values * correction.values
            gap = torch.where(known, rows.old - rollout, 0.0).abs().sum()
            sums |= {"correction": correction.values.sum(), "corrected": correction.touched.sum(), "gap": gap}
        if targets.reference is not None and options.kl is not None:
            reference = tensor(targets.reference[positions])
            apart = divergence(options.kl.estimator, new, reference, rows.old)
            sums["reference"] = divergence("k3", new.detach(), reference).sum()
            if options.kl.place == "loss":
                values = values + options.kl.coefficient * apart
        if options.entropy_coefficient:
            values = values - options.entropy_coefficient * entropy
        with torch.no_grad():
            drift = divergence("k3", torch.where(known, rollout, new), new)  # of KL(rollout || policy)
            self.tally.add(sums | {"entropy": entropy.sum(), "k3": drift.sum()})
            if mass is not None:
                sizes = self._passes.kept_sizes[positions]
                self.tally.add({"kept_mass": torch.where(tensor(sizes > 0), mass, 0.0).sum()})
                self.tally.count_kept(sizes)
        self.tally.counts["trained"] += len(positions)
        self.tally.counts["known"] += int(columns.claimed[positions].sum())
        return (values * tensor(weights[positions])).sum() + distilled

    def _distilled(self, scored: Scored, positions: Indices, learning: Floats) -> Tensor:
        """The teacher's part of the loss; 0 for reverse distillation, which is in the advantages."""
        targets, tensor = self._targets, self._passes.tensor
        rows = np.flatnonzero(targets.learns[positions])
        self.tally.counts["taught"] += len(rows)
        options, taught = targets.forward_kl, targets.taught
        if options is None or taught is None:
            if len(rows):
                self.tally.add({"distill": -tensor(targets.behind[positions]).sum()})
            return scored.logprobs.new_zeros(())
        if scored.others is None or scored.outside is None:
            return scored.logprobs.new_zeros(())
        _, logprobs, present = taught.rows(positions[rows], scored.others.shape[1])
        teacher, there = tensor(logprobs), tensor(present)
        at = tensor(rows)
        apart = forward_kl(scored.others[at], scored.outside[at], teacher, there)
        self.tally.add({"distill": apart.sum(), "mass": torch.where(there, teacher.exp(), 0.0).sum()})
        return options.weight * (apart * tensor(learning[positions[rows]])).sum()

    def _evidence(self, minibatch: Indices) -> Evidence:
        """Collect evidence about a minibatch whose loss or gradient is not finite; either every rank calls this or none."""
        targets, owner = self._targets, self._passes.owner
        trained = self._passes.columns.trained & np.isin(owner, minibatch)
        broken = self._passes.group.sum(self._optimizer.not_finite())
        new = targets.old if int(broken) else self._passes.computed(trained, np.zeros_like(targets.old))
        inputs = {
            "an advantage of": (
                targets.advantages, 1e6, "Bound the rewards, or the transforms that make advantages ([transform.NAME])."
            ),
            "a log-ratio to the old policy of": (
                np.where(targets.has_old, new - targets.old, 0.0).astype(np.float32), 30.0,
                against_old(self._options),
            ),
        }  # fmt: skip
        if targets.reference is not None:
            inputs["a log-ratio to the reference of"] = (
                new - targets.reference, 30.0, against_reference(self._options)
            )  # fmt: skip
        return Evidence(trained, owner, int(broken), new, inputs)


@contextmanager
def dropping(layers: Sequence[torch.nn.Module]) -> Iterator[None]:
    """Switch dropout on inside: for the forward pass and its backward, which may compute layers again."""
    try:
        for layer in layers:
            layer.train()
        yield
    finally:
        for layer in layers:
            layer.eval()


def clip_of(options: GrpoOptions, loss: Loss) -> Clip:
    """Return the bounds of the options, or the loss's own."""
    low = loss.clip.low if options.clip_low is None else options.clip_low
    own = low if loss.clip.low == loss.clip.high else loss.clip.high
    return Clip(low, own if options.clip_high is None else options.clip_high, options.dual_clip)

"""One batch turned into updates: which sequences each optimiser step sees, its gradient, and what is measured.

Nothing here waits for the device between the first forward and the last backward pass of a minibatch.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from atropos_core.alignment import compare
from atropos_core.errors import DataError
from atropos_core.types import Batch, Bools, Floats, Metrics
from atropos_trainer_grpo.advantages import whitened, with_divergence
from atropos_trainer_grpo.columns import columns_of, token_places
from atropos_trainer_grpo.corrections import importance_weights
from atropos_trainer_grpo.distillation import Taught, forward_kl
from atropos_trainer_grpo.diverged import Evidence, against_old, against_reference
from atropos_trainer_grpo.divergence import divergence
from atropos_trainer_grpo.group import ALONE, Group, full
from atropos_trainer_grpo.logprobs import Scored
from atropos_trainer_grpo.losses import Clip, Loss, Rows, token_weights
from atropos_trainer_grpo.model import score, score_nothing, vocabulary_of
from atropos_trainer_grpo.optimizer import Optimizer
from atropos_trainer_grpo.packing import microbatches, pack

if TYPE_CHECKING:
    from atropos_trainer_grpo.config import DistillationOptions, GrpoOptions

Indices = NDArray[np.int64]

SUMS = ("ratio", "clipped", "correction", "corrected", "reference", "entropy", "k3", "distill", "mass")
COUNTS = ("trained", "known", "taught")
SAMPLE = 1 / 16  # of the tokens: those that are scored once more, where the update alone would score them too late


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
        dropouts: Sequence[torch.nn.Module] = (),  # layers to switch on where gradients are computed
        reference: Callable[[], AbstractContextManager[torch.nn.Module]] | None = None,  # the model that KL is taken to
        group: Group = ALONE,
    ) -> None:
        self._model = model
        self._optimizer = optimizer
        self._options = options
        self._batch = batch
        self._columns = columns_of(batch, options)
        self._device = device
        self._seed = seed
        self._dropouts = dropouts
        self._single = options.epochs * options.minibatches == 1
        self._reference = reference
        self._group = group
        self._loss = loss
        self._clip = clip_of(options, loss)
        self._owner = np.repeat(np.arange(batch.sequences), batch.lengths)  # [N] the sequence of each token
        self._old = batch.logprobs  # [N] where `_has_old`
        self._has_old = self._columns.from_rollout
        self._reference_logprobs: Floats | None = None  # [N] where trained
        self._advantages = batch.advantages  # [N]
        self._taught: Taught | None = None
        self._learns = np.zeros(len(batch.tokens), np.bool_)  # [N] a trained token that the teacher speaks of
        self._behind = np.zeros(len(batch.tokens), np.float32)  # [N] teacher's - policy's logprob, in reverse
        if options.distillation is not None:
            self._taught = Taught.of(batch, vocabulary_of(model))
            self._learns = self._columns.trained & (self._taught.counts > 0)
        self._norm = torch.zeros(())
        self._sums: dict[str, Tensor] = {}
        self._compared = np.zeros(len(batch.tokens), np.bool_)  # [N] some rank has the trainer's logprob
        self._exact = np.zeros(len(batch.tokens), np.bool_)  # [N] and is that of the weights before the first step
        self._recomputed = np.zeros(len(batch.tokens), np.float32)  # [N] of those that all ranks have
        self._scored: list[
            tuple[Indices, Tensor]
        ] = []  # places [R], logprobs and entropies [2, R], on this rank's device
        self._seconds = {"forward": 0.0, "backward": 0.0, "optimizer": 0.0}
        self._losses: list[float] = []
        self._norms: list[float] = []
        self._rates: list[float] = []
        self._counts = dict.fromkeys(COUNTS, 0)

    def minibatches(self) -> Iterator[Indices]:
        """Sequence numbers for every optimiser step. Groups stay together, in an order drawn from seed and version."""
        groups, members = np.unique(self._batch.group, return_inverse=True)
        for epoch in range(self._options.epochs):
            place = np.arange(len(groups))
            if self._options.minibatches > 1:
                place = np.random.default_rng([self._seed, self._batch.version, epoch]).permutation(place)
            order = np.argsort(place[members], kind="stable")
            yield from (part for part in np.array_split(order, self._options.minibatches) if len(part))

    def backward(self, chosen: Indices) -> None:
        """Leave the gradient of the minibatch's loss in the parameters. Raises TrainingDiverged, with no gradient left,
        where the loss or an entry of the gradient is not finite."""
        first = not self._losses
        if first:
            self._prepare()
        if first and (self._dropouts or len(chosen) < self._batch.sequences):
            self._compare_ahead(chosen)
        self._optimizer.clear()
        batch, columns, options = self._batch, self._columns, self._options
        at = token_places(batch.offsets, chosen)
        offsets = np.concatenate([[0], np.cumsum(batch.lengths[chosen])])
        average = options.average or self._loss.average

        def weights_of(mask: Bools) -> Floats:
            weights = np.zeros(len(batch.tokens), dtype=np.float32)
            weights[at] = token_weights(average, mask[at], offsets, options.loss_length)
            return weights

        weights, learning = weights_of(columns.trained), weights_of(self._learns)

        losses = []
        moving = self._moving()[chosen]
        for sequences, active in ((chosen[moving], True), (chosen[~moving], False)):
            for part in self._passes(sequences):
                began = time.perf_counter()
                # What has no gradient is only measured.
                with dropping(self._dropouts if active else ()), torch.set_grad_enabled(active):
                    if len(part):
                        scored, places = self._score(part, taught=active)
                        loss = self._total(scored, places, weights, learning)
                        if not self._dropouts:
                            self._note(places, scored)
                    else:
                        loss = score_nothing(self._model, self._device)
                    between = time.perf_counter()
                    self._seconds["forward"] += between - began
                    if active:
                        loss.backward()
                        losses.append(loss.detach())
                        self._seconds["backward"] += time.perf_counter() - between
        if not self._dropouts:
            self._mark(chosen, exact=first)
        self._norm = full(self._optimizer.gradient_norm())
        summed = self._group.sum(torch.stack([*losses, torch.zeros_like(self._norm)]).sum())
        total, norm = torch.stack([summed, self._norm]).tolist()
        if math.isfinite(total) and not math.isfinite(norm):
            norm, self._norm = self._optimizer.scale_down()
        if not (math.isfinite(total) and math.isfinite(norm)):
            self._optimizer.clear()
            where = f"batch {batch.version}, optimiser step {len(self._losses) + 1}: loss {total:g}, gradient norm {norm:g}."
            raise self._evidence(chosen).error(where)
        self._losses.append(total)
        self._norms.append(norm)

    def _evidence(self, chosen: Indices) -> Evidence:
        """Of a minibatch whose loss or gradient is not finite; every rank comes here, or none does."""
        trained = self._columns.trained & np.isin(self._owner, chosen)
        broken = self._group.sum(self._optimizer.not_finite())
        new = self._old if int(broken) else self._computed(trained, np.zeros_like(self._old))
        inputs = {
            "an advantage of": (
                self._advantages, 1e6, "Bound the rewards, or what makes advantages of them ([transform.NAME])."
            ),
            "a log-ratio to the old policy of": (
                np.where(self._has_old, new - self._old, 0.0).astype(np.float32), 30.0,
                against_old(self._options),
            ),
        }  # fmt: skip
        if self._reference_logprobs is not None:
            inputs["a log-ratio to the reference of"] = (
                new - self._reference_logprobs, 30.0, against_reference(self._options)
            )  # fmt: skip
        return Evidence(trained, self._owner, int(broken), new, inputs)

    def write(self) -> None:
        """The optimiser step: parameters change here and nowhere else."""
        began = time.perf_counter()
        self._rates.append(self._optimizer.learning_rate)
        self._optimizer.step(self._norm)
        self._seconds["optimizer"] += time.perf_counter() - began

    def metrics(self) -> Metrics:
        """Means over all optimiser steps; `alignment/*` (`atropos_core.alignment`) by the first forward pass over each token."""
        sums, seen = self._over_all_ranks()
        counts = {name: max(count, 1) for name, count in seen.items()}
        taught = {"distill/positions": seen["taught"] / counts["trained"]} if self._taught is not None else {}
        return {
            "loss": float(np.mean(self._losses)),
            "grad_norm": float(np.mean(self._norms)),
            "learning_rate": self._rates[-1],
            "ratio/mean": sums["ratio"] / counts["trained"],
            "clip/fraction": sums.get("clipped", 0.0) / counts["trained"],
            "entropy": sums["entropy"] / counts["trained"],
            "kl/rollout_k3": sums["k3"] / counts["known"],
            **({"kl/reference_k3": sums["reference"] / counts["trained"]} if "reference" in sums else {}),
            **taught,
            **({"distill/kl": sums["distill"] / counts["taught"]} if "distill" in sums else {}),
            **({"distill/coverage": sums["mass"] / counts["taught"]} if "mass" in sums else {}),
            **(
                {
                    "correction/mean": sums["correction"] / counts["trained"],
                    "correction/fraction": sums["corrected"] / counts["trained"],
                }
                if "correction" in sums
                else {}
            ),
            **self._comparison(),
            "tokens": float(self._columns.trained.sum()),
            **{f"time/{name}_s": seconds for name, seconds in self._seconds.items()},
        }

    def _over_all_ranks(self) -> tuple[dict[str, float], dict[str, int]]:
        """The sums, those that any rank has, and the counts."""
        own = {name: float(value) for name, value in self._sums.items()} | self._counts
        both = [[own.get(name, 0.0) for name in SUMS + COUNTS], [float(name in own) for name in SUMS + COUNTS]]
        values, present = self._group.sum(torch.tensor(both, dtype=torch.float64)).tolist()
        made = {name: value for name, value, here in zip(SUMS + COUNTS, values, present, strict=True) if here}
        return made, {name: int(made[name]) for name in COUNTS}

    def _prepare(self) -> None:
        """What one look at the whole batch before any update gives: old and reference logprobs, and the advantages as they
        are trained."""
        options, columns, batch = self._options, self._columns, self._batch
        in_reward = options.kl is not None and options.kl.place == "reward"
        # Of a single update its own forward pass would do, if dropout did not make another network of it.
        if not self._single or in_reward or self._dropouts:
            self._recompute_old()
        if options.kl is not None:
            self._compute_reference()
        if in_reward:
            assert options.kl is not None and self._reference_logprobs is not None
            self._advantages = with_divergence(
                self._advantages, self._old - self._reference_logprobs, columns.trained, batch.offsets,
                options.kl.coefficient,
            )  # fmt: skip
        if options.whiten_advantages:
            self._advantages = whitened(self._advantages, columns.trained)
        if options.distillation is not None and options.distillation.kind == "reverse":
            self._learn_in_reverse(options.distillation)

    def _learn_in_reverse(self, options: DistillationOptions) -> None:
        """Take the teacher's view of each sampled token into its advantage: on-policy distillation."""
        assert self._taught is not None, "the options ask for it"
        own, known = self._taught.of_own(self._batch.tokens)
        self._learns = self._columns.trained & known
        if not self._learns.any():
            raise DataError(
                'trainer.distillation.kind = "reverse" needs the teacher\'s logprobs of the tokens that the policy sampled, and '
                "none of those that came is of one.",
                remedy='Have the teacher send the sampled token beside its likeliest, or set kind = "forward".',
            )
        if (self._learns & ~self._has_old).any():
            self._recompute_old()
        self._behind = np.where(self._learns, own - self._old, 0).astype(np.float32)
        rest = np.zeros_like(self._advantages) if options.alone else self._advantages
        self._advantages = rest + np.float32(options.weight) * self._behind

    def _moving(self) -> Bools:
        """[S] has a token whose loss has a gradient."""
        pulled = (
            self._options.kl is not None and self._options.kl.place == "loss"
        ) or self._options.entropy_coefficient
        forward = self._forward
        rewarded = (self._advantages != 0) & (forward is None or not forward.alone)
        moving = self._columns.trained & (rewarded | bool(pulled))
        if forward is not None:
            moving |= self._learns
        return np.logical_or.reduceat(moving, self._batch.offsets[:-1])

    @property
    def _forward(self) -> DistillationOptions | None:
        options = self._options.distillation
        return options if options is not None and options.kind == "forward" else None

    def _score(
        self, sequences: Indices, model: torch.nn.Module | None = None, *, taught: bool = False
    ) -> tuple[Scored, Indices]:
        """One forward pass: the scored tokens of these sequences, and where they stand in the batch [R]. With `taught`,
        logprobs of a teacher's tokens as well, where it speaks of any."""
        batch, columns = self._batch, self._columns
        at = token_places(batch.offsets, sequences)
        tokens = batch.tokens[at]
        group = batch.group[sequences] if self._options.share_prompts else None
        packing = pack(tokens, batch.lengths[sequences], self._device, group)
        rows = np.flatnonzero(columns.scored[at])
        temperature = np.repeat(columns.temperature[sequences], batch.lengths[sequences])[rows]
        others = None
        if taught and self._forward is not None and self._taught is not None and self._learns[at].any():
            others = self._tensor(self._taught.rows(at[rows])[0])
        scored = score(
            model or self._model,
            packing,
            packing.at(rows - 1),
            self._tensor(tokens[rows].astype(np.int64)),
            self._tensor(temperature),
            self._options.logprob_chunk,
            others,
        )
        return scored, at[rows]

    def _total(self, scored: Scored, places: Indices, weights: Floats, learning: Floats) -> Tensor:
        """The loss of these scored tokens: that of the trained ones among them. `weights` and `learning` [N] are those of
        the policy's loss and the teacher's."""
        options, columns = self._options, self._columns
        distilled = self._distilled(scored, places, learning)
        trained = np.flatnonzero(columns.trained[places])
        new, entropy = scored.logprobs, scored.entropy
        if len(trained) < len(places):
            chosen = self._tensor(trained)
            places, new, entropy = places[trained], new[chosen], entropy[chosen]
        rows = Rows(
            logprobs=new,
            old=torch.where(self._tensor(self._has_old[places]), self._tensor(self._old[places]), new.detach()),
            advantages=self._tensor(self._advantages[places]),
            sequence=self._tensor(np.cumsum(np.diff(self._owner[places], prepend=self._owner[places[:1]]) != 0)),
        )
        known, rollout = self._tensor(columns.known[places]), self._tensor(self._batch.logprobs[places])
        surrogate = self._loss(rows, self._clip)
        values, sums = surrogate.values, {"ratio": surrogate.ratio.sum()}
        if self._forward is not None and self._forward.alone:
            values = torch.zeros_like(values)
        if surrogate.clipped is not None:
            sums["clipped"] = surrogate.clipped.sum()
        if options.correction is not None:
            correction = importance_weights(options.correction.kind, rows, rollout, known, *options.correction.bounds)
            values = values * correction.values
            sums |= {"correction": correction.values.sum(), "corrected": correction.touched.sum()}
        if self._reference_logprobs is not None and options.kl is not None:
            reference = self._tensor(self._reference_logprobs[places])
            apart = divergence(options.kl.estimator, new, reference)
            sums["reference"] = divergence("k3", new.detach(), reference).sum()
            if options.kl.place == "loss":
                values = values + options.kl.coefficient * apart
        if options.entropy_coefficient:
            values = values - options.entropy_coefficient * entropy
        with torch.no_grad():
            drift = divergence("k3", torch.where(known, rollout, new), new)  # of KL(rollout || policy)
            self._add(sums | {"entropy": entropy.sum(), "k3": drift.sum()})
        self._counts["trained"] += len(places)
        self._counts["known"] += int(columns.known[places].sum())
        return (values * self._tensor(weights[places])).sum() + distilled

    def _distilled(self, scored: Scored, places: Indices, learning: Floats) -> Tensor:
        """The teacher's part of the loss; of reverse distillation, which is in the advantages, nothing."""
        rows = np.flatnonzero(self._learns[places])
        self._counts["taught"] += len(rows)
        options, taught = self._forward, self._taught
        if options is None or taught is None:
            if len(rows):
                self._add({"distill": -self._tensor(self._behind[places]).sum()})
            return scored.logprobs.new_zeros(())
        if scored.others is None or scored.outside is None:
            return scored.logprobs.new_zeros(())
        _, logprobs, present = taught.rows(places[rows], scored.others.shape[1])
        teacher, there = self._tensor(logprobs), self._tensor(present)
        at = self._tensor(rows)
        apart = forward_kl(scored.others[at], scored.outside[at], teacher, there)
        self._add({"distill": apart.sum(), "mass": torch.where(there, teacher.exp(), 0.0).sum()})
        return options.weight * (apart * self._tensor(learning[places[rows]])).sum()

    def _note(self, places: Indices, scored: Scored) -> None:
        """Keep the first logprobs that there are of these tokens, to be compared with what their senders say."""
        new = self._columns.known[places] & ~self._compared[places]
        both = torch.stack([scored.logprobs, scored.entropy]).detach()
        if new.all():
            self._scored.append((places, both))
        elif new.any():
            self._scored.append((places[new], both[:, self._tensor(np.flatnonzero(new))]))

    def _mark(self, sequences: Indices, *, exact: bool) -> None:
        """These have been scored, on whatever rank."""
        at = token_places(self._batch.offsets, sequences)
        new = at[self._columns.known[at] & ~self._compared[at]]
        self._compared[new] = True
        self._exact[new] = exact

    @torch.no_grad()
    def _compare_ahead(self, chosen: Indices) -> None:
        """By passes of its own, before any step: the first minibatch where dropout would make another network of it, and a
        sample of what comes after it, whose own forward passes are of weights that have moved."""
        batch, options = self._batch, self._options
        unknown = np.logical_or.reduceat(self._columns.known & ~self._compared, batch.offsets[:-1])
        later = np.setdiff1d(np.flatnonzero(unknown), chosen)
        drawn = np.random.default_rng([self._seed, batch.version, options.epochs]).permutation(later)
        before = np.cumsum(batch.lengths[drawn]) - batch.lengths[drawn]
        looked = drawn[before < SAMPLE * len(batch.tokens)]
        if self._dropouts:
            looked = np.concatenate([chosen[unknown[chosen]], looked])
        for part in self._passes(np.sort(looked)):
            if len(part):
                scored, places = self._score(part)
                self._note(places, scored)
            else:
                score_nothing(self._model, self._device)
        self._mark(looked, exact=True)

    def _comparison(self) -> Metrics:
        """Collective."""
        own = np.zeros((3, len(self._recomputed)), np.float32)  # logprob, entropy, and whether there is one
        for places, both in self._scored:
            own[:2, places] = both.float().cpu().numpy()
            own[2, places] = 1
        logprobs, entropy, there = self._group.sum_array(own)
        entropy = np.where(there > 0, entropy, np.float32(np.nan))
        return compare(self._batch, logprobs + self._recomputed, self._compared, self._exact, entropy)

    def _add(self, sums: Mapping[str, Tensor]) -> None:
        for name, value in sums.items():
            self._sums[name] = self._sums[name] + value.detach() if name in self._sums else value.detach()

    def _recompute_old(self) -> None:
        """What the ratio is taken against, where it is not the engine's logprobs."""
        wanting = self._columns.trained & ~self._columns.from_rollout
        self._old = self._computed(wanting, self._batch.logprobs)
        self._has_old = self._columns.trained
        shared = wanting & self._columns.known & ~self._compared
        self._recomputed = np.where(shared, self._old, self._recomputed)
        self._compared |= shared
        self._exact |= shared

    def _compute_reference(self) -> None:
        given = self._batch.columns.get("ref_logprobs")
        wanting, known = self._columns.trained, np.zeros(len(self._batch.tokens), np.float32)
        if given is not None:
            wanting, known = wanting & ~given.present, given.values
        if not wanting.any():
            self._reference_logprobs = known
            return
        assert self._reference is not None, "the trainer gives one where the options ask for KL"
        with self._reference() as model:
            self._reference_logprobs = self._computed(wanting, known, model)

    @torch.no_grad()
    def _computed(self, wanting: Bools, known: Floats, model: torch.nn.Module | None = None) -> Floats:
        """`known` [N], and logprobs by a pass without gradient where they are wanted."""
        sequences = np.flatnonzero(np.logical_or.reduceat(wanting, self._batch.offsets[:-1]))
        made = np.zeros(len(known), np.float32)
        for part in self._passes(sequences):
            if not len(part):
                score_nothing(model or self._model, self._device)
                continue
            scored, places = self._score(part, model)
            chosen = wanting[places]
            made[places[chosen]] = scored.logprobs.cpu().float().numpy()[chosen]
        return np.where(wanting, self._group.sum_array(made), known)

    def _passes(self, sequences: Indices) -> list[Indices]:
        """This rank's micro-batches; an empty one is a pass that the others make."""
        lengths, limit = self._batch.lengths, self._options.tokens_per_microbatch
        shared = (self._batch.tokens, self._batch.group) if self._options.share_prompts else (None, None)
        return self._group.passes(lengths, sequences, lambda order: microbatches(lengths, order, limit, *shared))

    def _tensor(self, values: NDArray[np.generic]) -> Tensor:
        return torch.from_numpy(values).to(self._device, non_blocking=True)


@contextmanager
def dropping(layers: Sequence[torch.nn.Module]) -> Iterator[None]:
    """Dropout inside: around the forward pass and its backward, which may compute layers again."""
    try:
        for layer in layers:
            layer.train()
        yield
    finally:
        for layer in layers:
            layer.eval()


def clip_of(options: GrpoOptions, loss: Loss) -> Clip:
    """The options' bounds, or the loss's own."""
    low = loss.clip.low if options.clip_low is None else options.clip_low
    own = low if loss.clip.low == loss.clip.high else loss.clip.high
    return Clip(low, own if options.clip_high is None else options.clip_high, options.dual_clip)

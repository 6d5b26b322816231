"""One batch turned into updates: which sequences each optimiser step sees, its gradient, and what is measured.

Nothing here waits for the device between the first forward and the last backward pass of a minibatch.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from atropos_core.errors import TrainingDiverged
from atropos_core.types import Batch, Metrics
from atropos_trainer_grpo.columns import columns_of, token_places
from atropos_trainer_grpo.logprobs import Scored
from atropos_trainer_grpo.losses import clipped_surrogate, token_weights
from atropos_trainer_grpo.model import score
from atropos_trainer_grpo.optimizer import Optimizer
from atropos_trainer_grpo.packing import microbatches, pack

if TYPE_CHECKING:
    from atropos_trainer_grpo.config import GrpoOptions

Indices = NDArray[np.int64]


class Update:
    """The work on one batch. `backward` and `write` alternate, once for each of `minibatches()`."""

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: Optimizer,
        options: GrpoOptions,
        batch: Batch,
        device: str,
        seed: int,
        dropouts: Sequence[torch.nn.Module] = (),  # layers to switch on where gradients are computed
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
        self._old = batch.logprobs  # [N]
        self._norm = torch.zeros(())
        self._sums: dict[str, Tensor] = {}
        self._most = torch.zeros(())  # of the alignment's differences
        self._seconds = {"forward": 0.0, "backward": 0.0, "optimizer": 0.0}
        self._losses: list[float] = []
        self._norms: list[float] = []
        self._rates: list[float] = []
        self._counts = {"trained": 0, "known": 0, "fresh": 0}

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
        where the loss or the gradient is not finite."""
        first = not self._losses
        if first and not self._single:
            self._recompute_old()
        if first and self._dropouts:
            self._align_without_dropout(chosen)
        self._optimizer.clear()
        batch, columns, options = self._batch, self._columns, self._options
        at = token_places(batch.offsets, chosen)
        offsets = np.concatenate([[0], np.cumsum(batch.lengths[chosen])])
        weights = np.zeros(len(batch.tokens), dtype=np.float32)
        weights[at] = token_weights(options.loss, columns.trained[at], offsets, options.loss_length)

        losses = []
        moving = columns.active[chosen]
        for sequences, active in ((chosen[moving], True), (chosen[~moving], False)):
            for part in microbatches(batch.lengths, sequences, options.tokens_per_microbatch):
                began = time.perf_counter()
                # A zero advantage has no gradient: such sequences are only measured.
                with dropping(self._dropouts if active else ()), torch.set_grad_enabled(active):
                    scored, places = self._score(part)
                    loss = self._loss(scored, places, weights)
                    if first and not self._dropouts:
                        self._align(scored, places)
                    between = time.perf_counter()
                    self._seconds["forward"] += between - began
                    if active:
                        loss.backward()
                        losses.append(loss.detach())
                        self._seconds["backward"] += time.perf_counter() - between
        self._norm = self._optimizer.gradient_norm()
        total, norm = torch.stack([torch.stack([*losses, torch.zeros_like(self._norm)]).sum(), self._norm]).tolist()
        if not (math.isfinite(total) and math.isfinite(norm)):
            self._optimizer.clear()
            raise TrainingDiverged(
                f"batch {batch.version}, optimiser step {len(self._losses) + 1}: loss {total}, gradient norm {norm}.",
                remedy="Resume from the last checkpoint with a lower trainer.learning_rate; look at ratio/mean before this step.",
            )
        self._losses.append(total)
        self._norms.append(norm)

    def write(self) -> None:
        """The optimiser step: parameters change here and nowhere else."""
        began = time.perf_counter()
        self._rates.append(self._optimizer.learning_rate)
        self._optimizer.step(self._norm)
        self._seconds["optimizer"] += time.perf_counter() - began

    def metrics(self) -> Metrics:
        """Means over all optimiser steps; `alignment/*` over the first one's forward pass, before anything changed."""
        counts = {name: max(count, 1) for name, count in self._counts.items()}
        sums = {name: float(value) for name, value in self._sums.items()}
        return {
            "loss": float(np.mean(self._losses)),
            "grad_norm": float(np.mean(self._norms)),
            "learning_rate": self._rates[-1],
            "ratio/mean": sums["ratio"] / counts["trained"],
            "clip/fraction": sums["clipped"] / counts["trained"],
            "entropy": sums["entropy"] / counts["trained"],
            "kl/rollout_k3": sums["k3"] / counts["known"],
            "alignment/max_abs_logprob_diff": float(self._most),
            "alignment/mean_abs_logprob_diff": sums["difference"] / counts["fresh"],
            "alignment/fresh_tokens": float(self._counts["fresh"]),
            "tokens": float(self._columns.trained.sum()),
            **{f"time/{name}_s": seconds for name, seconds in self._seconds.items()},
        }

    def _score(self, sequences: Indices) -> tuple[Scored, Indices]:
        """One forward pass: the scored tokens of these sequences, and where they stand in the batch [R]."""
        batch, columns = self._batch, self._columns
        at = token_places(batch.offsets, sequences)
        tokens = batch.tokens[at]
        group = batch.group[sequences] if self._options.share_prompts else None
        packing = pack(tokens, batch.lengths[sequences], self._device, group)
        rows = np.flatnonzero(columns.scored[at])
        temperature = np.repeat(columns.temperature[sequences], batch.lengths[sequences])[rows]
        scored = score(
            self._model,
            packing,
            packing.at(rows - 1),
            self._tensor(tokens[rows].astype(np.int64)),
            self._tensor(temperature),
            self._options.logprob_chunk,
        )
        return scored, at[rows]

    def _loss(self, scored: Scored, places: Indices, weights: NDArray[np.float32]) -> Tensor:
        batch, columns, new = self._batch, self._columns, scored.logprobs
        trained, known = self._tensor(columns.trained[places]), self._tensor(columns.known[places])
        rollout = self._tensor(batch.logprobs[places])
        given = columns.from_rollout[places] if self._single else np.ones(len(places), np.bool_)
        old = torch.where(self._tensor(given) & trained, self._tensor(self._old[places]), new.detach())
        loss, ratio, clipped = clipped_surrogate(
            new - old,
            self._tensor(batch.advantages[places]),
            self._tensor(weights[places]),
            self._options.clip_low,
            self._options.clip_above,
        )
        with torch.no_grad():
            drift = new.detach() - rollout  # k3 of KL(rollout || policy), Schulman's estimator: exp(d) - 1 - d
            sums = {
                "ratio": (ratio * trained).sum(),
                "clipped": (clipped & trained).sum(),
                "entropy": (scored.entropy * trained).sum(),
                "k3": torch.where(known & trained, drift.expm1() - drift, 0.0).sum(),
            }
            self._add(sums)
        self._counts["trained"] += int(columns.trained[places].sum())
        self._counts["known"] += int((columns.known & columns.trained)[places].sum())
        return loss

    @torch.no_grad()
    def _align(self, scored: Scored, places: Indices) -> None:
        """Compare with what the engine said of fresh tokens."""
        fresh = self._columns.fresh[places]
        difference = (scored.logprobs - self._tensor(self._batch.logprobs[places])).abs() * self._tensor(fresh)
        if len(places):
            self._most = torch.maximum(self._most.to(difference), difference.max())
        self._add({"difference": difference.sum()})
        self._counts["fresh"] += int(fresh.sum())

    @torch.no_grad()
    def _align_without_dropout(self, chosen: Indices) -> None:
        """By a pass of its own: the policy that was sampled has no dropout."""
        for part in microbatches(self._batch.lengths, chosen, self._options.tokens_per_microbatch):
            self._align(*self._score(part))

    def _add(self, sums: Mapping[str, Tensor]) -> None:
        for name, value in sums.items():
            self._sums[name] = self._sums[name] + value if name in self._sums else value

    @torch.no_grad()
    def _recompute_old(self) -> None:
        """Before several updates: what the ratio is taken against, where it is not the engine's logprobs."""
        wanting = self._columns.trained & ~self._columns.from_rollout
        sequences = np.flatnonzero(np.logical_or.reduceat(wanting, self._batch.offsets[:-1]))
        old = self._batch.logprobs.copy()
        for part in microbatches(self._batch.lengths, sequences, self._options.tokens_per_microbatch):
            scored, places = self._score(part)
            chosen = wanting[places]
            old[places[chosen]] = scored.logprobs.cpu().float().numpy()[chosen]
        self._old = old

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

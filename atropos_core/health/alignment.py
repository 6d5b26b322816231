"""Compare recomputed logprobs with those that came with a batch, from any sender and of any age.

For a sampled token let d = log p - log q, where p is the trainer's policy before the update, and q is the distribution that the
sender claims to have sampled from.

- If q has the same weights as p, d is rounding: the loop limits its largest |d| to `training.max_logprob_diff`.
- For samples from any q, exp(d) has mean 1, however far the policy has moved since. So the exp of the sum of d over a sequence is
  a likelihood ratio, a nonnegative martingale, and exceeds exp(x) with probability at most exp(-x) (Ville 1939; Markov's
  inequality at its end). Beyond EVIDENCE_NATS, plus what two ways of computing may differ by, the logprobs are not those of the
  sampling.
- In the other direction, claims above p, only the policy's movement gives a bound. `moved` is the largest change of a logprob of
  the probe since those weights. A mean |d| that exceeds 1 + 10 times `moved` by EVIDENCE_NATS in total is not explained by
  movement. Unlike the bound before, this one is a judgement, and a wide one: means are about a tenth of maxima.

Correct logprobs do not prove that tokens were sampled with them: the temperature or top_p may differ from what is reported. For
tokens that were sampled from p, -log p is the entropy of p on average. Over fresh tokens, the sum of the differences is a
martingale that stays within a few of its own standard errors. `surprise_z` counts these.

Truncated rollouts (top_p, top_k, min_p) say which tokens were kept. Then p and q are both renormalised over these, and all of the
above holds for them. If that is not known (records of older versions), q is q' / Z of the whole distribution q', where Z <= 1 is the
mass that was kept. It is never below q', so one side can be checked: d <= -log Z + rounding <= rounding for fresh tokens, and exp(d)
has a mean of at most 1 for older ones (a supermartingale, for which Ville's inequality also holds). Rollouts without logprobs are not
compared.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from atropos_core.types import Batch, Bools, Column, Floats, Metrics, ScoredGroup

MOVED = "moved_nats"  # a column of a batch, present if known
EVIDENCE_NATS = 18 * math.log(10)  # odds of 1 to 10**18: less than once in all sequences that will ever be trained
COMPUTING_NATS = 0.1  # per token: the average difference that kernels and precisions may cause
PLAUSIBLE_NATS, PLAUSIBLE_RATIO = (
    1.0,
    10.0,
)  # limits for a token's mean |d|: absolute, and relative to the probe's largest
EXPECTED_NATS, EXPECTED_RATIO = 0.2, 3.0  # the same, of what health still finds usual
ROUNDING_NATS = {"float32": 1e-4, "float64": 1e-4}
ROUNDING_NATS_16_BIT = 0.5
TIMES_ROUNDING = 4.0  # that a model's own rounding, as measured once, is exceeded by other tokens and other kernels


def largest_rounding(dtype: str) -> float:
    """Return by how many nats two ways of computing a logprob with the same weights of this type may differ."""
    return ROUNDING_NATS.get(dtype, ROUNDING_NATS_16_BIT)


def bound_of(rounding: float | None, dtype: str) -> float:
    """Return the largest allowed difference between engine and trainer, in nats, given the model's own rounding if it was measured.
    Never above the bound for 16-bit weights."""
    return min(max(largest_rounding(dtype), TIMES_ROUNDING * (rounding or 0.0)), ROUNDING_NATS_16_BIT)


def compare(batch: Batch, recomputed: Floats, compared: Bools, exact: Bools, entropy: Floats | None = None) -> Metrics:
    """Compare logprobs of a batch. `recomputed` [N] is log p where `compared` [N] is True. `exact` [N] is True if p has the weights
    before any optimizer step of this batch, not after one or more. `entropy` [N] is of the distribution p, NaN if unknown. Both are
    of p renormalised over the tokens that were kept, if the batch has them. Tokens without a claimed logprob are skipped; those
    that were cut to unknown tokens are compared on one side."""
    claimed = batch.sampled & np.repeat(batch.has_logprobs, batch.lengths)
    cut = claimed & np.repeat(batch.unknown_cut, batch.lengths)
    compared = compared & claimed
    difference = np.where(compared, recomputed.astype(np.float64) - batch.logprobs, 0.0)
    new = compared & exact & (batch.policy_version == batch.version - 1)
    fresh = new & ~cut
    sampled, count = int(batch.sampled.sum()), int(fresh.sum())
    of_fresh = np.where(fresh, np.abs(difference), 0.0)
    metrics: Metrics = {
        "alignment/max_abs_logprob_diff": float(np.max(of_fresh, initial=0.0)),  # a NaN must show
        "alignment/mean_abs_logprob_diff": float(of_fresh.sum()) / max(count, 1),
        "alignment/fresh_tokens": float(count),
        "alignment/unchecked_share": 1.0 - int((compared & ~cut).sum()) / sampled if sampled else 0.0,
        "alignment/without_logprobs": float((~batch.has_logprobs).sum()),
        "alignment/impossible_nats": 0.0,
        "alignment/unexplained_nats": 0.0,
    }
    if (compared & cut).any():
        metrics["alignment/truncated_share"] = int((compared & cut).sum()) / sampled
    if (new & cut).any():
        beyond = np.where(new & cut, np.maximum(difference, 0.0), 0.0)
        metrics["alignment/truncated_excess_nats"] = float(np.max(beyond))
        metrics["alignment/worst_truncated"] = float(_sequence_of(batch, int(beyond.argmax())))
    if count:
        metrics["alignment/worst_fresh"] = float(_sequence_of(batch, int(of_fresh.argmax())))
    if entropy is not None and (seen := fresh & np.isfinite(entropy)).any():
        surprise = -recomputed[seen].astype(np.float64) - entropy[seen]
        spread = math.sqrt(float(np.square(surprise).sum()))
        metrics["alignment/surprise_nats"] = float(surprise.mean())
        metrics["alignment/surprise_z"] = float(surprise.sum()) / spread if spread else 0.0
    other = compared & ~new
    if other.any():
        metrics |= _of_others(batch, difference, other, exact, cut)
    return metrics


def moved_column(values: Sequence[float | None]) -> Column:
    """Return the column of a value per sequence; None if it is unknown how far the policy moved."""
    present = np.array([value is not None for value in values], np.bool_)
    return Column("sequence", np.array([value or 0.0 for value in values], np.float32), present)


def owner(groups: Sequence[ScoredGroup], sequence: int) -> str:
    """Name the rollout that this sequence of the groups' batch belongs to."""
    rollouts = [(group, member) for group in groups for member, one in enumerate(group.episodes) for _ in one.rollouts]
    group, member = rollouts[sequence]
    return f"rollout {member} of task {group.task.id!a:.100} of environment {group.draw.environment!a:.100}"


def _of_others(batch: Batch, difference: NDArray[np.float64], other: Bools, exact: Bools, cut: Bools) -> Metrics:
    def by_sequence(values: NDArray[np.float64]) -> NDArray[np.float64]:
        return np.add.reduceat(np.where(other, values, 0.0), batch.offsets[:-1])  # [S]

    tokens, above = by_sequence(np.ones(len(other))), by_sequence(difference)
    whole, apart = by_sequence((~cut).astype(np.float64)), by_sequence(np.where(cut, 0.0, np.abs(difference)))
    moved = batch.columns.get(MOVED)
    nats = np.zeros(batch.sequences) if moved is None else moved.values.astype(np.float64)
    there = np.zeros(batch.sequences, np.bool_) if moved is None else moved.present
    there = there & (by_sequence((~exact | cut).astype(np.float64)) == 0)
    too_high = above - COMPUTING_NATS * tokens

    def beyond(floor: float, ratio: float) -> NDArray[np.float64]:
        return np.where(there, np.maximum(too_high, apart - (floor + ratio * nats) * tokens), too_high)

    impossible = beyond(PLAUSIBLE_NATS, PLAUSIBLE_RATIO)
    unexplained = beyond(EXPECTED_NATS, EXPECTED_RATIO)
    return {
        "alignment/stale_mean_abs_logprob_diff": float(apart.sum() / max(whole.sum(), 1.0)),
        "alignment/impossible_nats": float(np.maximum(impossible, 0.0).max()),
        "alignment/unexplained_nats": float(np.maximum(unexplained, 0.0).max()),
        "alignment/worst_stale": float(unexplained.argmax()),
    }


def _sequence_of(batch: Batch, token: int) -> int:
    return int(np.searchsorted(batch.offsets, token, "right")) - 1

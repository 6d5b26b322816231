"""The losses of the trainer as requests to a Tinker server, whose losses are sums: averages become factors of advantages and weights.

Three forms. `ppo` and `cispo` are the server's own losses with the same formulas. The policy gradient is its cross-entropy with
weights = advantages. GSPO's ratio needs a whole sequence: its gradient is computed here, from logprobs of a forward pass, and goes to
the server as a cross-entropy with weights = -dC/dlogprob, which has the same gradient.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from atropos_core.advantages import Average, token_weights
from atropos_core.types import Batch, Bools, Floats, offsets_of
from atropos_tinker_client.config import Loss, TinkerTrainerOptions

FURTHEST = 60.0  # nats: a larger log-ratio counts as this much


class Form(NamedTuple):
    """A loss: the server's name for it, its own average and the bounds of its ratio."""

    sent_as: str
    average: Average
    low: float
    high: float


FORMS: dict[Loss, Form] = {
    "grpo": Form("ppo", "sequence", 0.2, 0.2),
    "dr_grpo": Form("ppo", "constant", 0.2, 0.2),
    "dapo": Form("ppo", "token", 0.2, 0.28),
    "cispo": Form("cispo", "token", 1.0, 4.0),
    "gspo": Form("cross_entropy", "sequence", 3e-4, 4e-4),
    "reinforce": Form("cross_entropy", "sum", 0.2, 0.2),
}


def form_of(options: TinkerTrainerOptions) -> Form:
    """Return the form of the chosen loss, with the average and bounds of the options."""
    own = FORMS[options.loss]
    low = own.low if options.clip_low is None else options.clip_low
    by_default = low if own.low == own.high else own.high
    high = by_default if options.clip_high is None else options.clip_high
    return Form(own.sent_as, options.average or own.average, low, high)


def trained_tokens(batch: Batch) -> Bools:
    """[N] True if the loss counts the token: nothing predicts the first one of a sequence."""
    trained = batch.trained.copy()
    trained[batch.offsets[:-1]] = False
    return trained


def weights_of(batch: Batch, average: Average, loss_length: int | None) -> Floats:
    """[N] the factor of each token's loss in that of the batch, 0 where not trained. An episode in several sequences counts once."""
    at, offsets = _by_episode(batch)
    weights = np.zeros(len(batch.tokens), np.float32)
    weights[at] = token_weights(average, trained_tokens(batch)[at], offsets, loss_length)
    return weights


def gspo(batch: Batch, logprobs: Floats, old: Floats, factors: Floats, form: Form) -> tuple[float, NDArray[np.float64]]:
    """Return C = -sum_t min(s f, clip(s) f) with s = exp(mean_t(logprobs - old)) of the whole sequence and f = `factors` (GSPO,
    arXiv 2507.18071, eq. 13), and [N] dC/dlogprob: -s f, or 0 if the clip holds s fixed."""
    ratio, factors = sequence_ratios(batch, logprobs, old), factors.astype(np.float64)
    above, below = (factors > 0) & (ratio > 1 + form.high), (factors < 0) & (ratio < 1 - form.low)
    bound = np.where(above, 1 + form.high, np.where(below, 1 - form.low, ratio))
    return float(-(bound * factors).sum()), np.where(above | below, 0.0, -ratio * factors)


def sequence_ratios(batch: Batch, logprobs: Floats, old: Floats) -> NDArray[np.float64]:
    """[N] exp of the mean log-ratio over the trained tokens of each token's episode."""
    at, offsets = _by_episode(batch)
    trained = trained_tokens(batch)[at]
    apart = np.where(trained, logprobs.astype(np.float64)[at] - old.astype(np.float64)[at], 0.0)
    sums = np.add.reduceat(apart, offsets[:-1])
    counts = np.maximum(np.add.reduceat(trained.astype(np.int64), offsets[:-1]), 1)
    ratios = np.ones(len(batch.tokens))
    ratios[at] = np.repeat(np.exp(np.minimum(sums / counts, FURTHEST)), np.diff(offsets))
    return ratios


def _by_episode(batch: Batch) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the places in the batch of all tokens, one whole episode after another, and the offsets [E + 1] of episodes among them."""
    order = np.lexsort((batch.episode, batch.group))
    spans = [np.arange(batch.offsets[one], batch.offsets[one + 1]) for one in order]
    begins = np.ones(len(order), np.bool_)
    begins[1:] = (np.diff(batch.episode[order]) != 0) | (np.diff(batch.group[order]) != 0)
    ends = offsets_of(batch.lengths[order])
    return np.concatenate(spans), np.append(ends[:-1][begins], ends[-1])

"""What a batch means to this trainer: which tokens are scored, against which old logprobs, and what is refused."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from atropos_core.errors import ConfigError, DataError
from atropos_core.types import Batch, Bools, Floats

if TYPE_CHECKING:
    from atropos_trainer_grpo.config import GrpoOptions


@dataclass(frozen=True)
class Columns:
    """Columns of a batch in its own token order, [N] and [S]. Nothing is scored at the first token of a sequence."""

    trained: Bools  # [N] the loss counts it
    scored: Bools  # [N] its logprob is computed: trained or sampled
    from_rollout: Bools  # [N] the ratio's denominator is the engine's logprob; elsewhere the trainer's own
    known: Bools  # [N] the engine's logprob is that of the whole distribution
    temperature: Floats  # [S]


def columns_of(batch: Batch, options: GrpoOptions) -> Columns:
    """Raises ConfigError or DataError for a batch that these options cannot train on."""
    if not batch.sequences or batch.lengths.min() < 1:
        raise DataError(f"a batch of {batch.sequences} sequences cannot be trained on: each needs at least one token")
    if not np.isfinite(batch.advantages).all():
        raise DataError("the batch has an advantage that is not a finite number")
    if (supervised := batch.columns.get("sft")) is not None and supervised.values.any():
        raise DataError(
            f"{supervised.values.sum()} of {batch.sequences} sequences are marked as supervised data (sft), and this "
            "trainer has no loss of imitation: its own loss would be wrong for them.",
            remedy='Have the environment send no groups with "sft" in their overrides, leave them out in a transform, or '
            "use a trainer that learns from them.",
        )
    follows = np.ones(len(batch.tokens), dtype=np.bool_)
    follows[batch.offsets[:-1]] = False
    trained = batch.trained & follows
    sampled = batch.sampled & follows
    has_logprobs = np.repeat(batch.has_logprobs, batch.lengths)
    truncated = np.repeat(batch.truncated, batch.lengths)
    if options.old_logprobs != "recompute":
        if (trained & truncated & has_logprobs).any():
            raise ConfigError(
                f'trainer.old_logprobs = "{options.old_logprobs}", but sequences were sampled with top_p or top_k: their logprobs are '
                "renormalised over what was kept, and a ratio against them is biased.",
                remedy='Set trainer.old_logprobs = "recompute", or sample with top_p = 1 and top_k = 0.',
            )
        if options.missing_logprobs == "refuse" and (trained & ~has_logprobs).any():
            raise DataError(
                'sequences came without logprobs, and trainer.missing_logprobs = "refuse".\n'
                '  Set it to "recompute", or have the client send logprobs.'
            )
    if options.correction is not None and (trained & truncated & has_logprobs).any():
        raise ConfigError(
            "trainer.correction is set, but sequences were sampled with top_p or top_k: their logprobs are renormalised over "
            "what was kept, and importance weights against them are biased.",
            remedy="Leave trainer.correction out, or sample with top_p = 1 and top_k = 0.",
        )
    known = sampled & has_logprobs & ~truncated
    return Columns(
        trained=trained,
        scored=trained | sampled,
        from_rollout=known
        if options.old_logprobs != "recompute" and options.correction is None
        else np.zeros_like(known),
        known=known,
        temperature=np.where(batch.temperature > 0, batch.temperature, 1.0).astype(np.float32),
    )


def token_positions(offsets: NDArray[np.int64], chosen: NDArray[np.int64]) -> NDArray[np.int64]:
    """Where the tokens of the `chosen` sequences stand in the batch, one sequence after another."""
    lengths = offsets[chosen + 1] - offsets[chosen]
    ends = np.cumsum(lengths)
    positions: NDArray[np.int64] = np.repeat(offsets[chosen] - (ends - lengths), lengths)
    return positions + np.arange(len(positions))

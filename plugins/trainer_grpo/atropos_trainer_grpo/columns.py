"""The trainer's view of a batch: the tokens that are scored, their old logprobs, and what is refused."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from atropos_core.errors import DataError
from atropos_core.types import EXPERTS, Batch, Bools, Floats

SUPERVISED = "supervised"  # the loss of supervised steps

if TYPE_CHECKING:
    from atropos_trainer_grpo.config import GrpoOptions


@dataclass(frozen=True)
class Columns:
    """Columns of a batch in its own token order, [N] and [S]. Nothing is scored at the first token of a sequence."""

    trained: Bools  # [N] the loss counts it
    scored: Bools  # [N] its logprob is computed: trained or sampled
    claimed: Bools  # [N] sampled, and the sender says with which logprob
    from_rollout: Bools  # [N] the ratio's denominator is the engine's logprob; elsewhere the trainer's own
    cut: Bools  # [N] trained, and its distribution is over the tokens that top_p, top_k and min_p kept
    temperature: Floats  # [S]


def columns_of(batch: Batch, options: GrpoOptions) -> Columns:
    """Raises DataError for a batch that these options cannot train on."""
    if not batch.sequences or batch.lengths.min() < 1:
        raise DataError(f"a batch of {batch.sequences} sequences cannot be trained on: each needs at least one token")
    if not np.isfinite(batch.advantages).all():
        raise DataError("the batch has an advantage that is not a finite number")
    supervised = batch.columns.get("sft")
    if supervised is not None and supervised.values.any() and options.loss != SUPERVISED:
        raise DataError(
            f"{supervised.values.sum()} of {batch.sequences} sequences are marked as supervised data (sft), and a step that "
            "learns from rewards has no loss of imitation: its own loss would be wrong for them.",
            remedy='Have the environment send no groups with "sft" in their overrides, leave them out in a transform, or '
            "train on such data before the run: [warmup].",
        )
    if (unknown := batch.unknown_cut & np.logical_or.reduceat(batch.trained, batch.offsets[:-1])).any():
        raise DataError(
            f"{unknown.sum()} of {batch.sequences} sequences were sampled with top_p, top_k or min_p, and do not say which tokens "
            "these kept. Their logprobs are renormalised over them: without them, the update would be biased.",
            remedy="Have the engine, or the client that sends them, give the kept tokens (`kept` of a completion and of a rollout). Or "
            "sample with top_p = 1, top_k = 0 and min_p = 0.",
        )
    if options.router_replay and EXPERTS not in batch.columns:
        raise DataError(
            f"trainer.router_replay replays the experts that the engine chose, and none of {batch.sequences} sequences has any recorded.",
            remedy="Sample with engine hf or vllm in this run: they record them. Rollouts of a client that cannot are trained with "
            "trainer.router_replay = false.",
        )
    follows = np.ones(len(batch.tokens), dtype=np.bool_)
    follows[batch.offsets[:-1]] = False
    trained = batch.trained & follows
    sampled = batch.sampled & follows
    claimed = sampled & np.repeat(batch.has_logprobs, batch.lengths)
    takes_engines = options.old_logprobs != "recompute" and options.correction is None
    if options.old_logprobs != "recompute" and options.missing_logprobs == "refuse" and (trained & ~claimed).any():
        raise DataError(
            f"of {batch.sequences} sequences {(~batch.has_logprobs).sum()} came without logprobs, and "
            'trainer.missing_logprobs = "refuse".',
            remedy='Set it to "recompute"; or have the client send logprobs.',
        )
    return Columns(
        trained=trained,
        scored=trained | sampled,
        claimed=claimed,
        from_rollout=claimed if takes_engines else np.zeros_like(claimed),
        cut=trained & (batch.kept_sizes > 0),
        temperature=np.where(batch.temperature > 0, batch.temperature, 1.0).astype(np.float32),
    )


def token_positions(offsets: NDArray[np.int64], chosen: NDArray[np.int64]) -> NDArray[np.int64]:
    """The places in the batch of the tokens of the `sequences`, one sequence after another."""
    lengths = offsets[chosen + 1] - offsets[chosen]
    ends = np.cumsum(lengths)
    positions: NDArray[np.int64] = np.repeat(offsets[chosen] - (ends - lengths), lengths)
    return positions + np.arange(len(positions))

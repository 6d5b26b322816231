"""The loss of supervised steps (a warm start). Not for rewards: it has no advantage, so `trainer.loss` does not name it."""

from __future__ import annotations

import torch

from atropos_trainer_grpo.losses.rows import Clip, Loss, Rows, Surrogate


def negative_log_likelihood(rows: Rows, clip: Clip) -> Surrogate:
    """-logprobs: with the average over all trained tokens of a batch, the cross-entropy of language models, as TRL's SFTTrainer has it
    (loss_type = "nll", num_items_in_batch)."""
    return Surrogate(-rows.logprobs, torch.ones_like(rows.logprobs))


SUPERVISED = Loss("supervised", negative_log_likelihood, "token", Clip(0.2, 0.2))

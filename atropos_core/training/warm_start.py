"""A warm start: the batches, learning rates and held-out loss of supervised steps, and what a checkpoint says of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from atropos_core.errors import CheckpointError
from atropos_core.interfaces import Trainer
from atropos_core.plugins.services import WarmupRows
from atropos_core.storage.checkpoint import taking_up
from atropos_core.training.batch import to_batch
from atropos_core.types import Batch, Draw, Episode, Metrics, Rollout, ScoredGroup, Task

MEASUREMENTS = 10  # of the held-out loss during a warm start


class WarmStart:
    """Supervised steps 1, 2, ... `steps` on rows. `learning_rate` is the highest of the schedule."""

    def __init__(self, rows: WarmupRows, learning_rate: float) -> None:
        self.rows = rows
        self.learning_rate = learning_rate

    def batch(self, step: int) -> Batch:
        """Return the batch of a step. Each step is an update, so its version is its number."""
        return to_batch([_group(row, number) for number, row in enumerate(self.rows.batch(step))], step)

    def rate(self, step: int) -> float:
        return self.learning_rate * self.rows.rate(step)

    async def held_out_loss(self, step: int, trainer: Trainer) -> Metrics:
        """Return the held-out loss after a step, if it is measured then: at both ends, and a few times between."""
        steps, rows = self.rows.steps, self.rows.held_out
        every = max(steps // MEASUREMENTS, 1)
        if not rows or (step % every and step != steps):
            return {}
        return {"warmup/held_out_loss": await mean_loss(rows, trainer)}


async def mean_loss(rows: Sequence[Rollout], trainer: Trainer) -> float:
    """Return the mean negative log-likelihood of the trained tokens of all rows."""
    scores = await trainer.logprobs([row.tokens for row in rows])
    values = np.concatenate([score[row.trained] for score, row in zip(scores, rows, strict=True)])
    return -float(values.mean(dtype=np.float64))


def state_of(warmup: WarmStart | None, steps: int) -> Mapping[str, Any]:
    """Return what a checkpoint says of a warm start of `steps` steps. `warmup` is None once it is done."""
    return {"steps": steps, "digest": warmup.rows.digest if warmup is not None else ""}


def check_state(state: Mapping[str, Any], warmup: WarmStart | None, steps: int, step: int) -> None:
    """Raises CheckpointError if a checkpoint of `step` is of another warm start."""
    with taking_up("what the checkpoint says of a warm start"):
        had, digest = int(state.get("steps", 0)), str(state.get("digest", ""))
    if had != steps:
        raise CheckpointError(
            f"the checkpoint is of a run whose warm start has {had} steps, and now it has {steps}: the steps after it would be others.",
            remedy=f"Set warmup.steps={had}." if had and steps else "Resume with the [warmup] that the run had.",
        )
    if warmup is not None and step < steps and digest != warmup.rows.digest:
        raise CheckpointError(
            "the rows of the warm start, or their order, have changed since the checkpoint, which is in the middle of it.",
            remedy="Bring back the file, the seed and the [warmup] that the run had, or begin a new run.",
        )


def _group(row: Rollout, number: int) -> ScoredGroup:
    draw = Draw(-1, "warmup", "train", number, 0)
    return ScoredGroup(draw, Task(str(number), ()), (Episode((row,), 0.0),), np.zeros(1, np.float32))

"""The options of `[bridge] use = "checkpoint"`."""

from __future__ import annotations

from pydantic import Field

from atropos_core.plugins.options import Options


class CheckpointBridgeOptions(Options):
    """Options of the bridge "checkpoint"."""

    every: int = Field(
        1, ge=1, description="publish each version that this divides; more than 1 needs training.max_staleness"
    )
    keep: int = Field(1, ge=1, description="published checkpoints that stay on disk during the run")
    save_deadline_s: float = Field(1800.0, gt=0, description="seconds for writing one checkpoint to disk")

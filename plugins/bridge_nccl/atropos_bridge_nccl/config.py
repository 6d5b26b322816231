"""The options of `[bridge] use = "nccl"`."""

from __future__ import annotations

from pydantic import Field

from atropos_core.plugins.options import Options


class NcclBridgeOptions(Options):
    """Options of the bridge "nccl"."""

    every: int = Field(
        1, ge=1, description="publish each version that this divides; more than 1 needs training.max_staleness"
    )
    deadline_s: float = Field(
        600.0, gt=0, description="seconds for all processes to join, and for one broadcast of the weights"
    )

"""What a run file may say under `[bridge] use = "delta"`."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from atropos_core.plugins.provider import Options


class DeltaBridgeOptions(Options):
    """Options of the bridge "delta"."""

    every: int = Field(
        1, ge=1, description="publish each version that this divides; more than 1 wants training.max_staleness"
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto", description="what travels; auto: as the engine has its weights, or where it does not tell, the trainer"
    )
    deadline_s: float = Field(
        1800.0, gt=0, description="seconds for each part of a publication: finding, sending and applying what changed"
    )

"""The options of `[bridge] use = "delta"`."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from atropos_core.plugins.options import Options


class DeltaBridgeOptions(Options):
    """Options of the bridge "delta"."""

    every: int = Field(
        1, ge=1, description="publish each version that this divides; more than 1 needs training.max_staleness"
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto",
        description="precision that is sent; auto: the engine's, or the trainer's if the engine does not report one",
    )
    deadline_s: float = Field(
        1800.0, gt=0, description="seconds for each part of a publication: finding, sending and applying changes"
    )

"""The options of `[bridge] use = "lora"`."""

from __future__ import annotations

from pydantic import Field

from atropos_core.plugins.options import Options


class LoraBridgeOptions(Options):
    """Options of the bridge "lora". The trainer's options describe the adapter: `[trainer.lora]`."""

    keep: int = Field(
        2,
        ge=2,
        description="adapters that stay on disk during the run; engines read each once, when it is published",
    )
    save_deadline_s: float = Field(120.0, gt=0, description="seconds for writing one adapter to disk")

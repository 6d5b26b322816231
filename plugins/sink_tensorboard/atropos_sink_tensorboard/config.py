"""Options of the sink `tensorboard`."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from atropos_core.plugins.provider import Options


class TensorboardOptions(Options):
    directory: Path = Field(Path("tensorboard"), description="in the run directory, or anywhere by an absolute path")
    flush_s: float = Field(
        5.0,
        ge=0,
        description="seconds after which what is recorded has reached the file, at the latest; it does so at every "
        "checkpoint, too",
    )

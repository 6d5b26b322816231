"""Options of the sink `tensorboard`."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from atropos_core.plugins.provider import Options


class TensorboardOptions(Options):
    directory: Path = Path("tensorboard")  # in the run directory, or anywhere by an absolute path
    flush_s: float = Field(
        5.0, ge=0
    )  # what is recorded reaches the file at most so much later, and at every checkpoint

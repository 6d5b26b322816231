"""Options of the sink `wandb`. The key is none of them: `wandb login` or WANDB_API_KEY, so that no file of a run has it."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from atropos_core.plugins.provider import Options


class WandbOptions(Options):
    mode: Literal["online", "offline", "disabled"] = "online"  # offline: files in wandb/ of the run directory
    project: str = Field("atropos", min_length=1)
    entity: str | None = None  # team or user; unset: your default one
    name: str | None = None  # unset: that of the run directory
    group: str | None = None
    tags: tuple[str, ...] = ()
    config: bool = True  # send the resolved run file, without what is named like a secret
    system_metrics: bool = False  # W&B's own figures of this machine
    start_deadline_s: float = Field(60.0, gt=0)
    finish_deadline_s: float = Field(
        20.0, gt=0, le=25
    )  # for the last of the data; the run closes its parts within 30 s

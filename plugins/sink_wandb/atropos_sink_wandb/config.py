"""Options of the sink `wandb`. The key is none of them: `wandb login` or WANDB_API_KEY, so that no file of a run has it."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from atropos_core.plugins.provider import Options


class WandbOptions(Options):
    mode: Literal["online", "offline", "disabled"] = Field(
        "online", description="online; offline: files in wandb/ of the run directory; disabled: nothing"
    )
    project: str = Field("atropos", min_length=1, description="where the run is shown")
    entity: str | None = Field(None, description="team or user; unset: your default one")
    name: str | None = Field(None, description="of the run; unset: that of the run directory")
    group: str | None = Field(None, description="under which runs are shown together; unset: none")
    tags: tuple[str, ...] = Field((), description="that runs are found by")
    config: bool = Field(True, description="send the resolved run file, without what is named like a secret")
    system_metrics: bool = Field(False, description="W&B's own figures of this machine")
    start_deadline_s: float = Field(60.0, gt=0, description="seconds for W&B to answer at the start")
    finish_deadline_s: float = Field(
        20.0, gt=0, le=25, description="seconds for the last of the data; the run closes its parts within 30 s"
    )

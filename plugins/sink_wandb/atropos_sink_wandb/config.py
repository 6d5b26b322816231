"""Options of the sink `wandb`. The key is not an option (`wandb login` or WANDB_API_KEY), so it is in none of the run's files."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from atropos_core.plugins.provider import Options


class WandbOptions(Options):
    mode: Literal["online", "offline", "disabled"] = Field(
        "online", description="online; offline: files in wandb/ of the run directory; disabled: nothing"
    )
    project: str = Field("atropos", min_length=1, description="project that shows the run")
    entity: str | None = Field(None, description="team or user; unset: your default one")
    name: str | None = Field(None, description="name of the run; unset: the name of the run directory")
    group: str | None = Field(None, description="group of runs that are shown together; unset: none")
    tags: tuple[str, ...] = Field((), description="tags to find the run by")
    config: bool = Field(True, description="send the resolved run file, except keys that look like secrets")
    system_metrics: bool = Field(False, description="W&B's own measurements of this machine")
    start_deadline_s: float = Field(60.0, gt=0, description="seconds to wait for W&B at the start")
    finish_deadline_s: float = Field(
        20.0, gt=0, le=25, description="seconds to send the last metrics; the run closes its parts within 30 s"
    )

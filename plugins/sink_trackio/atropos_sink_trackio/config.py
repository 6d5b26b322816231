"""Options of the sink `trackio`. Its directory is not an option: Trackio's own commands read it from TRACKIO_DIR."""

from __future__ import annotations

from pydantic import Field

from atropos_core.plugins.provider import Options


class TrackioOptions(Options):
    project: str = Field("atropos", min_length=1, description="project that shows the run; created if missing")
    name: str | None = Field(None, description="name of the run; unset: the name of the run directory")
    group: str | None = Field(None, description="group of runs that belong together")
    config: bool = Field(
        True, description="keep the resolved run file with the run, except keys that look like secrets"
    )

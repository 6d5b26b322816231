"""Options of the sink `trackio`. Where Trackio keeps its projects is none of them: TRACKIO_DIR says that to Trackio's own commands too."""

from __future__ import annotations

from pydantic import Field

from atropos_core.plugins.provider import Options


class TrackioOptions(Options):
    project: str = Field("atropos", min_length=1, description="where the run is shown; made where there is none")
    name: str | None = Field(None, description="of the run; unset: that of the run directory")
    group: str | None = Field(None, description="of runs that belong together")
    config: bool = Field(True, description="keep the resolved run file with it, without what is named like a secret")

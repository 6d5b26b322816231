"""Options of the sink `mlflow`. A server's user and password are none of them: MLflow reads them from its own variables."""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import Field

from atropos_core.plugins.provider import Options


class MlflowOptions(Options):
    tracking_uri: str | None = Field(
        None,
        description="where runs are kept: http://HOST:PORT of a server, file:/PATH, or sqlite:////PATH (which needs the whole of "
        "mlflow); unset: MLFLOW_TRACKING_URI",
    )
    experiment: str = Field("atropos", min_length=1, description="where the run is shown; made where there is none")
    name: str | None = Field(None, description="of the run; unset: that of the run directory")
    tags: Mapping[str, str] = Field({}, description="that runs are found by")
    config: bool = Field(True, description="the resolved run file as parameters, without what is named like a secret")
    artifacts: bool = Field(
        False,
        description="send config.toml, metrics.jsonl and what the health checks found as the run's artifacts when it ends",
    )
    start_deadline_s: float = Field(60.0, gt=0, description="seconds for MLflow to answer at the start")
    finish_deadline_s: float = Field(
        20.0, gt=0, le=25, description="seconds for the last of the data; the run closes its parts within 30 s"
    )

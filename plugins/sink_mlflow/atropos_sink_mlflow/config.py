"""Options of the sink `mlflow`. MLflow reads a server's user and password from its own variables, so they are not options."""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import Field

from atropos_core.plugins.provider import Options


class MlflowOptions(Options):
    tracking_uri: str | None = Field(
        None,
        description="where MLflow keeps runs: http://HOST:PORT of a server, file:/PATH, or sqlite:////PATH (needs the full mlflow "
        "package); unset: MLFLOW_TRACKING_URI",
    )
    experiment: str = Field("atropos", min_length=1, description="experiment that shows the run; created if missing")
    name: str | None = Field(None, description="name of the run; unset: the name of the run directory")
    tags: Mapping[str, str] = Field({}, description="tags to find the run by")
    config: bool = Field(
        True, description="log the resolved run file as parameters, except keys that look like secrets"
    )
    artifacts: bool = Field(
        False,
        description="upload config.toml, metrics.jsonl and the findings of the health checks as artifacts when the run ends",
    )
    start_deadline_s: float = Field(60.0, gt=0, description="seconds to wait for MLflow at the start")
    finish_deadline_s: float = Field(
        20.0, gt=0, le=25, description="seconds to send the last metrics; the run closes its parts within 30 s"
    )

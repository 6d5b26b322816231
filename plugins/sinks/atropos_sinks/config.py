"""Options of the sinks.

Keys and passwords are not options, so they are in none of the run's files: `wandb login` or WANDB_API_KEY, and MLflow's own
variables. The directory of Trackio is not one either, because Trackio's own commands read it from TRACKIO_DIR.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path, PurePath
from typing import Literal

from pydantic import Field, field_validator

from atropos_core.plugins.options import Options


class CsvOptions(Options):
    file: str = Field("metrics.csv", description="file name in the run directory")

    @field_validator("file")
    @classmethod
    def _check_file_name(cls, value: str) -> str:
        if PurePath(value).name != value or value in ("", ".", ".."):
            raise ValueError(
                f"file = {value!r} is not a file name: the table is in the run directory, so leave folders out"
            )
        return value


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


class TensorboardOptions(Options):
    directory: Path = Field(Path("tensorboard"), description="in the run directory, or anywhere by an absolute path")
    flush_s: float = Field(
        5.0,
        ge=0,
        description="seconds after which what is recorded has reached the file, at the latest; it does so at every "
        "checkpoint, too",
    )


class TrackioOptions(Options):
    project: str = Field("atropos", min_length=1, description="project that shows the run; created if missing")
    name: str | None = Field(None, description="name of the run; unset: the name of the run directory")
    group: str | None = Field(None, description="group of runs that belong together")
    config: bool = Field(
        True, description="keep the resolved run file with the run, except keys that look like secrets"
    )


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

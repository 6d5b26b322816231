"""One MLflow run, through MLflow's own client: read what it has, and add to it. Every call may wait for the network."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from atropos_core.types import Metrics
from atropos_sinks.config import MlflowOptions

METRICS, PARAMS = 1000, 100  # that MLflow accepts in one call
PARAM_LENGTH = 6000
ODD = re.compile(r"[^\w.\- :/]")  # not allowed in a name in MLflow
DEFAULTS = {  # unless the user says otherwise. Our thread retries, so MLflow's own timeouts may be short
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
}


def recorded_name(name: str) -> str:
    """The name of a metric or a parameter with the characters that MLflow accepts."""
    return ODD.sub("_", name)


class TrackedRun:
    """A new MLflow run, or an earlier one continued by its id. Raises what MLflow raises, and OSError."""

    def __init__(self, options: MlflowOptions, uri: str, name: str, run_id: str | None) -> None:
        for variable, value in DEFAULTS.items():
            os.environ.setdefault(variable, value)
        if uri.startswith("file:"):
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # required by MLflow 3.6 and later
        from mlflow import MlflowClient

        self._client: Any = MlflowClient(tracking_uri=uri)
        if run_id is None:
            found = self._client.get_experiment_by_name(options.experiment)
            experiment = found.experiment_id if found else self._client.create_experiment(options.experiment)
            run_id = self._client.create_run(experiment, tags=dict(options.tags), run_name=name).info.run_id
        else:
            self._client.update_run(run_id, status="RUNNING")
        self.id: str = run_id

    def add_params(self, values: Mapping[str, Any]) -> None:
        """Add the parameters that the run does not have yet: MLflow never changes one."""
        from mlflow.entities import Param

        there = self._client.get_run(self.id).data.params
        new = [
            Param(recorded_name(name), str(value)[:PARAM_LENGTH])
            for name, value in values.items()
            if recorded_name(name) not in there
        ]
        for at in range(0, len(new), PARAMS):
            self._client.log_batch(self.id, params=new[at : at + PARAMS])

    def recorded(self) -> set[tuple[str, int]]:
        """Names and steps of the metrics that the run has."""
        names = self._client.get_run(self.id).data.metrics
        return {(name, one.step) for name in names for one in self._client.get_metric_history(self.id, name)}

    def add(self, step: int, metrics: Metrics, there: set[tuple[str, int]]) -> None:
        """Record the metrics of this step that are not in `there` yet."""
        from mlflow.entities import Metric

        now_ms = int(1000 * time.time())
        named = {recorded_name(name): float(value) for name, value in metrics.items()}
        new = [Metric(name, value, now_ms, step) for name, value in named.items() if (name, step) not in there]
        for at in range(0, len(new), METRICS):
            self._client.log_batch(self.id, metrics=new[at : at + METRICS])

    def add_files(self, paths: Sequence[Path]) -> None:
        for path in paths:
            self._client.log_artifact(self.id, str(path))

    def end(self, status: str) -> None:
        self._client.set_terminated(self.id, status)

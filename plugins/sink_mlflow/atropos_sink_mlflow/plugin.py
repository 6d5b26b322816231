"""Register the sink `mlflow`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from atropos_core import hookimpl
from atropos_core.plugins.provider import Provider, RunContext

if TYPE_CHECKING:
    from atropos_core.interfaces import Sink
    from atropos_sink_mlflow.config import MlflowOptions


def build(options: MlflowOptions, context: RunContext) -> Sink:
    from atropos_sink_mlflow.sink import MlflowSink

    return MlflowSink(options, context.directory, context.steps)


@hookimpl
def atropos_sinks() -> Iterable[Provider[Sink]]:
    summary = "MLflow, on a tracking server or in files"
    return [
        Provider("mlflow", summary, "atropos_sink_mlflow.config:MlflowOptions", build, requires=frozenset({"mlflow"}))
    ]

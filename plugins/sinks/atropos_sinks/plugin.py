"""Register the sinks `csv`, `mlflow`, `tensorboard`, `trackio` and `wandb`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from atropos_core import hookimpl
from atropos_core.plugins.provider import Provider, RunContext

if TYPE_CHECKING:
    from atropos_core.interfaces import Sink
    from atropos_sinks.config import CsvOptions, MlflowOptions, TensorboardOptions, TrackioOptions, WandbOptions


def csv_sink(options: CsvOptions, context: RunContext) -> Sink:
    from atropos_sinks.csv_sink import CsvSink

    return CsvSink(options, context.directory)


def mlflow_sink(options: MlflowOptions, context: RunContext) -> Sink:
    from atropos_sinks.mlflow_sink import MlflowSink

    return MlflowSink(options, context.directory, context.steps)


def tensorboard_sink(options: TensorboardOptions, context: RunContext) -> Sink:
    from atropos_sinks.tensorboard_sink import TensorboardSink

    return TensorboardSink(options, context.directory)


def trackio_sink(options: TrackioOptions, context: RunContext) -> Sink:
    from atropos_sinks.trackio_sink import TrackioSink

    return TrackioSink(options, context.directory)


def wandb_sink(options: WandbOptions, context: RunContext) -> Sink:
    from atropos_sinks.wandb_sink import WandbSink

    return WandbSink(options, context.directory)


@hookimpl
def atropos_sinks() -> Iterable[Provider[Sink]]:
    yield Provider(
        "csv",
        "metrics.csv in the run directory: a row a step",
        "atropos_sinks.config:CsvOptions",
        csv_sink,
        announces=lambda options: {"writes": options.file, "named_by": "file"},
    )
    yield Provider(
        "mlflow",
        "MLflow, on a tracking server or in files",
        "atropos_sinks.config:MlflowOptions",
        mlflow_sink,
        requires=frozenset({"mlflow"}),
        extra="mlflow",
    )
    yield Provider(
        "tensorboard",
        "event files in tensorboard/ of the run directory",
        "atropos_sinks.config:TensorboardOptions",
        tensorboard_sink,
        requires=frozenset({"tensorboard"}),
        extra="tensorboard",
        announces=lambda options: {"writes": str(options.directory), "named_by": "directory"},
    )
    yield Provider(
        "trackio",
        "Trackio, in its files on this machine",
        "atropos_sinks.config:TrackioOptions",
        trackio_sink,
        requires=frozenset({"trackio"}),
        extra="trackio",
        announces=lambda options: {
            "writes": f"the run {options.name or 'with the name of its directory'} of Trackio's project {options.project}",
            "named_by": "name",
        },
    )
    yield Provider(
        "wandb",
        "Weights & Biases, online or offline",
        "atropos_sinks.config:WandbOptions",
        wandb_sink,
        requires=frozenset({"wandb"}),
        extra="wandb",
    )

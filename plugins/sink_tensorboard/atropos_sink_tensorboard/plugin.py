"""Register the sink `tensorboard`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from atropos_core import hookimpl
from atropos_core.plugins.provider import Provider, RunContext

if TYPE_CHECKING:
    from atropos_core.interfaces import Sink
    from atropos_sink_tensorboard.config import TensorboardOptions


def build(options: TensorboardOptions, context: RunContext) -> Sink:
    from atropos_sink_tensorboard.sink import TensorboardSink

    return TensorboardSink(options, context.directory)


@hookimpl
def atropos_sinks() -> Iterable[Provider[Sink]]:
    summary = "event files in tensorboard/ of the run directory"
    return [
        Provider(
            "tensorboard",
            summary,
            "atropos_sink_tensorboard.config:TensorboardOptions",
            build,
            requires=frozenset({"tensorboard"}),
            announces=lambda options: {"writes": str(options.directory), "named_by": "directory"},
        )
    ]

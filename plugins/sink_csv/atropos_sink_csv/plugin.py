"""Register the sink `csv`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from atropos_core import hookimpl
from atropos_core.plugins.provider import Provider, RunContext

if TYPE_CHECKING:
    from atropos_core.interfaces import Sink
    from atropos_sink_csv.config import CsvOptions


def build(options: CsvOptions, context: RunContext) -> Sink:
    from atropos_sink_csv.sink import CsvSink

    return CsvSink(options, context.directory)


@hookimpl
def atropos_sinks() -> Iterable[Provider[Sink]]:
    return [
        Provider(
            "csv",
            "metrics.csv in the run directory: a row a step",
            "atropos_sink_csv.config:CsvOptions",
            build,
            announces=lambda options: {"writes": options.file, "named_by": "file"},
        )
    ]

"""Register the sink `trackio`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from atropos_core import hookimpl
from atropos_core.plugins.provider import Provider, RunContext

if TYPE_CHECKING:
    from atropos_core.interfaces import Sink
    from atropos_sink_trackio.config import TrackioOptions


def build(options: TrackioOptions, context: RunContext) -> Sink:
    from atropos_sink_trackio.sink import TrackioSink

    return TrackioSink(options, context.directory)


@hookimpl
def atropos_sinks() -> Iterable[Provider[Sink]]:
    summary = "Trackio, in its files on this machine"
    return [
        Provider(
            "trackio",
            summary,
            "atropos_sink_trackio.config:TrackioOptions",
            build,
            requires=frozenset({"trackio"}),
            announces=lambda options: {
                "writes": f"the run {options.name or 'with the name of its directory'} of Trackio's project {options.project}",
                "named_by": "name",
            },
        )
    ]

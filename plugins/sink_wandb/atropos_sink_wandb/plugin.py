"""Register the sink `wandb`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from atropos_core import hookimpl
from atropos_core.plugins.provider import Provider, RunContext

if TYPE_CHECKING:
    from atropos_core.interfaces import Sink
    from atropos_sink_wandb.config import WandbOptions


def build(options: WandbOptions, context: RunContext) -> Sink:
    from atropos_sink_wandb.sink import WandbSink

    return WandbSink(options, context.directory)


@hookimpl
def atropos_sinks() -> Iterable[Provider[Sink]]:
    summary = "Weights & Biases, online or offline"
    return [Provider("wandb", summary, "atropos_sink_wandb.config:WandbOptions", build, requires=frozenset({"wandb"}))]

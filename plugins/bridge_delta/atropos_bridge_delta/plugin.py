"""Offers the bridge "delta"."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from atropos_core import hookimpl
from atropos_core.plugins.model_provider import BridgeProvider
from atropos_core.plugins.provider import RunContext

if TYPE_CHECKING:
    from atropos_bridge_delta.config import DeltaBridgeOptions
    from atropos_core.interfaces import Bridge, Transport


def build(options: DeltaBridgeOptions, context: RunContext) -> Bridge:
    from atropos_bridge_delta.bridge import DeltaBridge

    return DeltaBridge(options, context)


def transports(options: DeltaBridgeOptions) -> frozenset[Transport]:
    """Return whole models: engine and trainer must support those, although only changes travel."""
    return frozenset({"checkpoint"})


@hookimpl
def atropos_bridges() -> Iterable[BridgeProvider]:
    yield BridgeProvider(
        name="delta",
        summary="what an update changed, compressed: for engines behind a slow link, with no disk in common",
        config="atropos_bridge_delta.config:DeltaBridgeOptions",
        build=build,
        transports=transports,
        requires=frozenset({"torch"}),
    )

"""Offers the bridge "checkpoint"."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from atropos_core import hookimpl
from atropos_core.plugins.model_provider import BridgeProvider
from atropos_core.plugins.provider import RunContext

if TYPE_CHECKING:
    from atropos_bridge_checkpoint.config import CheckpointBridgeOptions
    from atropos_core.interfaces import Bridge, Transport


def build(options: CheckpointBridgeOptions, context: RunContext) -> Bridge:
    from atropos_bridge_checkpoint.bridge import CheckpointBridge

    return CheckpointBridge(options, context)


def transports(options: CheckpointBridgeOptions) -> frozenset[Transport]:
    return frozenset({"checkpoint"})


@hookimpl
def atropos_bridges() -> Iterable[BridgeProvider]:
    yield BridgeProvider(
        name="checkpoint",
        summary="whole checkpoints on disk, which engines reload: fits whatever can load a model, costs a copy",
        config="atropos_bridge_checkpoint.config:CheckpointBridgeOptions",
        build=build,
        transports=transports,
        requires=frozenset({"torch", "transformers"}),
    )

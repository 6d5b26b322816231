"""Offers the bridge "lora"."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from atropos_core import hookimpl
from atropos_core.plugins.model_provider import BridgeProvider
from atropos_core.plugins.provider import RunContext

if TYPE_CHECKING:
    from atropos_bridge_lora.config import LoraBridgeOptions
    from atropos_core.interfaces import Bridge, Transport


def build(options: LoraBridgeOptions, context: RunContext) -> Bridge:
    from atropos_bridge_lora.bridge import LoraBridge

    return LoraBridge(options, context)


def transports(options: LoraBridgeOptions) -> frozenset[Transport]:
    return frozenset({"adapter"})


@hookimpl
def atropos_bridges() -> Iterable[BridgeProvider]:
    yield BridgeProvider(
        name="lora",
        summary="adapters travel, the base model stays: a new one at each version, while the engines go on sampling",
        config="atropos_bridge_lora.config:LoraBridgeOptions",
        build=build,
        transports=transports,
        requires=frozenset({"torch", "peft"}),
    )

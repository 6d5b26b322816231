"""Offers the bridge "nccl"."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from atropos_core import hookimpl
from atropos_core.plugins.model_provider import BridgeProvider
from atropos_core.plugins.provider import RunContext

if TYPE_CHECKING:
    from atropos_bridge_nccl.config import NcclBridgeOptions
    from atropos_core.interfaces import Bridge, Transport


def build(options: NcclBridgeOptions, context: RunContext) -> Bridge:
    from atropos_bridge_nccl.bridge import NcclBridge

    return NcclBridge(options, context)


def transports(options: NcclBridgeOptions) -> frozenset[Transport]:
    return frozenset({"broadcast"})


def announces(options: NcclBridgeOptions) -> Mapping[str, Any]:
    """The weight-transfer backend that a vLLM server must be started with: ours, atropos_bridge_nccl.vllm.entry.NAME."""
    return {"weight_transfer": "atropos_nccl"}


@hookimpl
def atropos_bridges() -> Iterable[BridgeProvider]:
    yield BridgeProvider(
        name="nccl",
        summary="weights are broadcast from the trainer's memory into every engine's: NCCL between GPUs, gloo between CPUs",
        config="atropos_bridge_nccl.config:NcclBridgeOptions",
        build=build,
        transports=transports,
        announces=announces,
        requires=frozenset({"torch"}),
    )

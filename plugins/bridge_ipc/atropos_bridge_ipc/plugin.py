"""Offers the bridge "ipc"."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from atropos_core import hookimpl
from atropos_core.plugins.model_provider import BridgeProvider
from atropos_core.plugins.provider import RunContext

if TYPE_CHECKING:
    from atropos_bridge_ipc.config import IpcOptions
    from atropos_core.interfaces import Bridge, Transport


def build(options: IpcOptions, context: RunContext) -> Bridge:
    from atropos_bridge_ipc.bridge import IpcBridge

    return IpcBridge(options, context)


def transports(options: IpcOptions) -> frozenset[Transport]:
    shared: frozenset[Transport] = frozenset({"posix_shm", "cuda_ipc"})
    copied: frozenset[Transport] = frozenset({"copy"})
    return {None: shared | copied, True: copied, False: shared}[options.copies]


def announces(options: IpcOptions) -> Mapping[str, Any]:
    """The weight-transfer backend that a vLLM server must be started with: ours, atropos_bridge_ipc.vllm.entry.NAME."""
    return {"weight_transfer": "atropos_ipc"}


@hookimpl
def atropos_bridges() -> Iterable[BridgeProvider]:
    yield BridgeProvider(
        name="ipc",
        summary="one copy of the weights: the trainer writes where the engine reads (POSIX shared memory, CUDA IPC)",
        config="atropos_bridge_ipc.config:IpcOptions",
        build=build,
        transports=transports,
        announces=announces,
        requires=frozenset({"torch", "safetensors"}),
    )

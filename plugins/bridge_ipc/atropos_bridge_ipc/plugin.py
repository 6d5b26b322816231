"""Offers the bridge "ipc"."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from atropos_bridge_ipc.config import IpcOptions
from atropos_core import hookimpl
from atropos_core.registry import Provider, RunContext

if TYPE_CHECKING:
    from atropos_core.interfaces import Bridge, Transport


def build(options: IpcOptions, context: RunContext) -> Bridge:
    from atropos_bridge_ipc.bridge import IpcBridge

    return IpcBridge(options, context)


def transports(options: IpcOptions) -> frozenset[Transport]:
    return frozenset({"posix_shm", "cuda_ipc"})


@hookimpl
def atropos_bridges() -> Iterable[Provider[Bridge]]:
    yield Provider(
        name="ipc",
        summary="one copy of the weights: the trainer writes where the engine reads (POSIX shared memory, CUDA IPC)",
        config=IpcOptions,
        build=build,
        transports=transports,
        requires=frozenset({"torch"}),
    )

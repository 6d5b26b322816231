"""The bridge's code at an engine's end: which it is depends on where the engine keeps its weights."""

from __future__ import annotations

from typing import Any


def engine_end(engine: Any) -> Any:
    """For weights in the engine's own process the one end, for weights in a server's workers the other."""
    if hasattr(engine, "transfer_weights"):
        from atropos_bridge_ipc.servers import ServerExtension

        return ServerExtension(engine)
    from atropos_bridge_ipc.extensions import EngineExtension

    return EngineExtension(engine)

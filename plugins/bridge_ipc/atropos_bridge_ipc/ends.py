"""Choose the bridge's extension for an engine, by the process that holds the engine's weights."""

from __future__ import annotations

from typing import Any


def engine_end(engine: Any) -> Any:
    """Return a ServerExtension if a server's workers hold the weights, else an EngineExtension."""
    if hasattr(engine, "transfer_weights"):
        from atropos_bridge_ipc.servers import ServerExtension

        return ServerExtension(engine)
    from atropos_bridge_ipc.extensions import EngineExtension

    return EngineExtension(engine)

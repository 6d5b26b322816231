"""The bridge's extension in the engine's process."""

from __future__ import annotations

from atropos_tinker_client.engine import TinkerEngine


class EngineExtension:
    """Has the engine sample from weights that were saved at the server."""

    def __init__(self, engine: TinkerEngine) -> None:
        self._engine = engine

    async def sample_from(self, path: str, version: int) -> None:
        await self._engine.sample_from(path, version)

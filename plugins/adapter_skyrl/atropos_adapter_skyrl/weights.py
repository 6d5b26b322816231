"""Send SkyRL's updates to Atropos engines, as copies of the weights.

An engine keeps sampling under the old weights while the new ones are saved; only loading pauses it. Tokens that it samples
afterwards carry the new version.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from atropos_adapter_skyrl.source import GroupSource
from atropos_core.errors import FitError, WeightsMismatch
from atropos_core.interfaces import Engine
from atropos_core.storage.tempdirs import owned_prefix


class Publisher:
    """Let SkyRL write a model directory, and every engine load it."""

    def __init__(self, engines: Sequence[Engine]) -> None:
        if not engines:
            raise FitError(
                "no engine would be sent SkyRL's weights: what workers sample would stay as it was at the start.",
                remedy="Name them: atropos.engines='[http://127.0.0.1:8001]', each an `atropos engine`.",
            )
        self._engines = engines

    async def publish(self, version: int, save: Callable[[str], None]) -> None:
        """Return once all engines sample from the weights that `save` writes. If an engine fails to load them, the training ends."""
        with tempfile.TemporaryDirectory(prefix=owned_prefix("skyrl")) as directory:
            where = Path(directory) / "policy"
            await asyncio.to_thread(save, str(where))
            if not (where.is_dir() and any(where.iterdir())):
                raise WeightsMismatch(
                    f"SkyRL did not write its policy to {where} on this machine.",
                    remedy="If SkyRL's workers run on other machines, set TMPDIR to a folder that all machines share.",
                )
            await asyncio.gather(*(self._load(engine, where, version) for engine in self._engines))

    async def _load(self, engine: Engine, directory: Path, version: int) -> None:
        async with engine.paused(version):
            await engine.load_weights(directory)

    async def close(self) -> None:
        await asyncio.gather(*(engine.close() for engine in self._engines))


class Dispatch:
    """SkyRL's dispatch, whose syncs report the version of the weights. Without a publisher, SkyRL's own sync is used."""

    def __init__(self, dispatch: Any, trainer: Any, source: GroupSource, publisher: Publisher | None) -> None:
        self._dispatch = dispatch
        self._trainer = trainer
        self._source = source
        self._publisher = publisher

    def __getattr__(self, name: str) -> Any:
        return getattr(self._dispatch, name)

    async def save_weights_for_sampler(self, model_id: str | None = None) -> None:
        version: int = self._trainer.global_step  # training steps that these weights have seen
        await self._source.announce(version)
        if self._publisher is None:
            await self._dispatch.save_weights_for_sampler()
        else:
            await self._publisher.publish(version, self._save)
        await self._source.set_version(version)
        await self._trainer.after_publish()

    def _save(self, directory: str) -> None:
        self._dispatch.save_hf_model("policy", directory, self._trainer.tokenizer)

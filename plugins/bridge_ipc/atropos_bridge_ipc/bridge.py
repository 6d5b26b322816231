"""The supervisor's part: it brings the manifest and the segment from the engine to the trainer, and keeps them apart in
time. No torch, no weights, and once `connect` returns no descriptor either.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from atropos_bridge_ipc import handles
from atropos_bridge_ipc.engine_extension import VERSION_SLOT
from atropos_core import console
from atropos_core.errors import FitError, WeightsMismatch
from atropos_core.interfaces import Bridge, Endpoint, Engine, Publication

if TYPE_CHECKING:
    from atropos_bridge_ipc.config import IpcOptions
    from atropos_core.plugins.provider import RunContext


class IpcBridge(Bridge):
    """The first engine owns the weights, and the trainer's parameters are views of them: publishing copies nothing.
    Engines that cannot share, and all but the first, load a copy of the trainer's weights at each publish."""

    def __init__(self, options: IpcOptions, context: RunContext) -> None:
        self._options = options
        self._deadline_s = options.connect_deadline_s
        self._transports = context.transports or (context.transport or "posix_shm",)
        self._model = context.model
        self._directory = context.directory / "ipc"
        self._nonce = secrets.token_hex(16)
        self._trainer: Endpoint
        self._engines: Sequence[Engine] = ()
        self._copying: Sequence[Engine] = ()  # of these, those that load copies
        self._synchronizes = False

    def extensions(self) -> Mapping[Literal["engine", "trainer"], str]:
        return {
            "engine": "atropos_bridge_ipc.engine_extension:extension_for",
            "trainer": "atropos_bridge_ipc.trainer_extension:TrainerExtension",
        }

    async def connect(self, trainer: Endpoint, engines: Sequence[Engine]) -> None:
        """Have the trainer adopt every tensor of the first engine, and tell the other engines where it keeps copies.
        Raises WeightsMismatch if two models differ in anything or do not share memory, and FitError if an engine can
        neither share nor copy."""
        self._trainer, self._engines = trainer, list(engines)
        self._directory.mkdir(mode=0o700, exist_ok=True)
        handles.sweep(self._directory)
        reason = await self._share(engines[0]) if self._transports[0] != "copy" else ""
        shared = self._transports[0] != "copy" and not reason
        copying = list(engines)[1:] if shared else list(engines)
        await self._check_copying(copying, reason)
        if reason:
            console.warn(f"bridge 'ipc' copies weights at each publish, because they cannot be shared: {reason}")
            await self._value(trainer, "load", str(self._model))
        if copying:
            await self._offer_copies(copying)
        self._copying = copying

    @asynccontextmanager
    async def writing(self, version: int) -> AsyncIterator[None]:
        """Pause the engines while the trainer writes. An error leaves them paused: weights that are half written are never sampled from."""
        began = time.perf_counter()
        await asyncio.gather(*(engine.pause() for engine in self._engines))
        seconds = time.perf_counter() - began
        yield
        began = time.perf_counter()
        copied = 0
        if self._copying:
            written = await self._value(self._trainer, "write_copies", VERSION_SLOT, version)
            await asyncio.gather(*(self._value(engine.endpoint, "load", version) for engine in self._copying))
            copied = written * (1 + len(self._copying))
        if self._synchronizes:  # kernels that still write would race with the engine's first reads
            await self._value(self._trainer, "finish_writes")
        await asyncio.gather(*(engine.resume(version) for engine in self._engines))
        self.published = Publication(version, seconds + time.perf_counter() - began, bytes_copied=copied)

    async def close(self) -> None:
        if self._directory.is_dir():
            for path in self._directory.glob("*.json"):
                path.unlink(missing_ok=True)
            if not any(self._directory.iterdir()):
                self._directory.rmdir()

    # -- one copy

    async def _share(self, engine: Engine) -> str:
        """Return why weights cannot be shared, or an empty text."""
        wanted = await self._value(self._trainer, "wanted")
        where = {**self._where(0), "wanted": wanted}
        offer, descriptors = await self._call(engine.endpoint, "export", self._transports[0], where)
        try:
            if "impossible" in offer:
                return str(offer["impossible"])
            offer["directory"] = str(self._model)
            receipt = await self._value(self._trainer, "adopt", offer, descriptors=descriptors)
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
        if "impossible" in receipt:
            return str(receipt["impossible"])
        if receipt["segment"] != offer["segment"]:
            raise WeightsMismatch(
                f"the trainer has mapped segment {receipt['segment']}, and the engine exported {offer['segment']}."
            )
        await self._agree(engine.endpoint, self._trainer, "the engine", "the trainer", slot=0)
        await self._agree(self._trainer, engine.endpoint, "the trainer", "the engine", slot=1)
        self._synchronizes = offer["transport"] == "cuda_ipc"
        return ""

    # -- copies

    async def _check_copying(self, engines: Sequence[Engine], reason: str) -> None:
        because = f" The first cannot share its weights: {reason}." if reason else ""
        for engine in engines:
            if self._options.copies is False:
                raise FitError(
                    f"bridge.copies = false, and engine {self._engines.index(engine)} would have to copy.{because}",
                    remedy="Remove `copies = false`, run one engine, or use `--bridge checkpoint`.",
                )
            if not await self._value(engine.endpoint, "takes_copies"):
                raise FitError(
                    f"engine {self._engines.index(engine)} can only share the weights, with one trainer on its device, and"
                    f" loads no copies.{because}",
                    remedy="Run one engine, on the trainer's device, or use `--bridge checkpoint`.",
                )

    async def _offer_copies(self, engines: Sequence[Engine]) -> None:
        path = str(self._directory / "trainer.json")
        identity = await self._value(
            self._trainer, "offer_copies", path, self._nonce, self._where(0)["model"], str(self._model)
        )
        for engine in engines:
            where = self._where(self._engines.index(engine))
            mapped = await self._value(engine.endpoint, "attach", where, path)
            if any(one != identity for one in mapped):
                raise WeightsMismatch(f"the engine has mapped segments {mapped}, and the trainer exported {identity}.")
            await self._agree(self._trainer, engine.endpoint, "the trainer", "the engine", slot=0)

    # -- both

    def _where(self, number: int) -> dict[str, Any]:
        """Describe the handle files to an engine's extension."""
        return {
            "directory": str(self._directory),
            "file": f"engine{number}",
            "nonce": self._nonce,
            "model": handles.model_hash(Path(self._model)),
            "deadline_s": self._deadline_s,
        }

    async def _agree(self, writer: Endpoint, reader: Endpoint, by: str, of: str, *, slot: int) -> None:
        written = secrets.randbits(62)
        await self._value(writer, "write_sentinel", slot, written)
        found = await self._value(reader, "read_sentinel", slot)
        if found != written:
            raise WeightsMismatch(
                f"{by} wrote {written:#x} into the shared segment, and {of} reads {found:#x} there: they do not share memory."
            )

    async def _value(self, endpoint: Endpoint, method: str, *arguments: Any, descriptors: Sequence[int] = ()) -> Any:
        value, given = await self._call(endpoint, method, *arguments, descriptors=descriptors)
        for descriptor in given:
            os.close(descriptor)
        return value

    async def _call(
        self, endpoint: Endpoint, method: str, *arguments: Any, descriptors: Sequence[int] = ()
    ) -> tuple[Any, list[int]]:
        return await endpoint.call(method, *arguments, descriptors=descriptors, deadline_s=self._deadline_s)

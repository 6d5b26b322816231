"""The bridge's extension in the engine's process: it takes an update piece by piece, checks the whole, and only then applies it."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Sequence
from typing import Any, BinaryIO, Protocol

from torch import nn

from atropos_bridge_delta.directory import ModelDirectory
from atropos_bridge_delta.model import LoadedModel
from atropos_bridge_delta.update_file import digest_of
from atropos_core.errors import CheckpointError, WeightsMismatch


class Weights(Protocol):
    """The target of an update."""

    def describe(self) -> list[list[Any]] | None:
        """Return name, dtype and shape of each tensor, or None if the trainer decides what travels."""

    async def begin(self, tensors: Sequence[Sequence[Any]], wanted: str, directory: str, config: str) -> str:
        """Return the digest of the engine's weights; called while the engine is paused. It may first load the weights again that it began
        with. `wanted` is the digest of the trainer's weights, `directory` the run's model if this process can see it, and `config` that
        model's configuration. Raises WeightsMismatch."""

    async def apply(self, update: BinaryIO) -> None:
        """Called while the engine is paused. After an exception its state is unknown."""

    def digest(self) -> str: ...

    def close(self) -> None:
        """Remove what was written to disk here; may be called twice."""


class EngineExtension:
    """Keeps what has arrived in an unnamed file of the temporary directory until it is applied. Only `apply` touches the engine's weights,
    in one go: a transfer that breaks off before leaves the engine as it was."""

    def __init__(self, engine: Any) -> None:  # an Engine, with `model` if it is a WeightHolder
        self._weights = _weights_of(engine)
        self._state = ""  # which weights the engine has; empty: not known
        self._wanted = ""  # the state that what arrives will bring about
        self._arrived: BinaryIO | None = None
        self._applying = asyncio.Lock()

    async def open(self) -> list[list[Any]] | None:
        return self._weights.describe()

    async def begin(self, tensors: Sequence[Sequence[Any]], wanted: str, directory: str, config: str) -> str:
        """Return the paused engine's state: `wanted` if it has the trainer's weights, bit for bit."""
        async with self._applying:
            self._state = await self._weights.begin(tensors, wanted, directory, config)
        return self._state

    async def state(self) -> str:
        return self._state

    async def take(self, state: str, offset: int, piece: bytes) -> None:
        """Take a piece of the update that leads to `state`. Pieces may come in any order and more than once."""
        if self._arrived is None or state != self._wanted:
            self._drop()
            self._arrived = tempfile.TemporaryFile(prefix="atropos-delta-")  # noqa: SIM115 - until it is applied
            self._wanted = state
        try:
            self._arrived.seek(offset)
            self._arrived.write(piece)
        except OSError as error:
            raise CheckpointError(
                f"bridge 'delta' cannot write an update into {tempfile.gettempdir()} on the engine's machine: {error}",
                remedy="Free some of that disk, or name another in TMPDIR.",
            ) from error

    async def check(self, state: str, size: int, digest: str) -> None:
        """Raises WeightsMismatch unless all of that update has arrived."""
        if state == self._state:
            return
        found = await asyncio.to_thread(digest_of, self._file(state))
        if found != (size, digest):
            raise WeightsMismatch(
                f"an update of {size} bytes with digest {digest} was sent, and {found[0]} bytes with {found[1]} have arrived. Nothing of "
                "it was applied.",
                remedy="Something on the way changes what passes: look at the network between trainer and engine.",
            )

    async def apply(self, base: str, state: str) -> None:
        """Bring the paused engine from `base` (empty: from any state) to `state`. A second call, after a lost answer, changes nothing.
        The caller may leave meanwhile: an update that has begun is completed."""
        await asyncio.shield(asyncio.ensure_future(self._apply(base, state)))

    async def digest(self) -> str:
        """Return the digest of every bit of the engine's weights."""
        return await asyncio.to_thread(self._weights.digest)

    async def close(self) -> None:
        async with self._applying:
            self._drop()
            self._state = ""
            self._weights.close()

    async def _apply(self, base: str, state: str) -> None:
        async with self._applying:
            if state == self._state:
                return
            if base and base != self._state:
                raise WeightsMismatch(
                    f"an update changes weights of state {base}, and this engine's are {self._state or 'not known'}.",
                    remedy="`atropos resume` the run: each engine then begins with a full copy where it needs one.",
                )
            file = self._file(state)
            self._state = ""  # until every block is written
            await self._weights.apply(file)
            self._state = state
            self._drop()

    def _file(self, state: str) -> BinaryIO:
        if self._arrived is None or state != self._wanted:
            raise WeightsMismatch(f"nothing has arrived of an update to state {state}.")
        return self._arrived

    def _drop(self) -> None:
        if self._arrived is not None:
            self._arrived.close()
            self._arrived = None


def _weights_of(engine: Any) -> Weights:
    if isinstance(getattr(engine, "model", None), nn.Module):
        return LoadedModel(engine)
    return ModelDirectory(engine)

"""The bridge's extension in the trainer's process: it keeps a copy of the weights published last, and encodes what differs from it."""

from __future__ import annotations

import asyncio
import hashlib
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, BinaryIO

import torch
from torch import Tensor

from atropos_bridge_delta.tensors import bits, digest, named_dtype
from atropos_bridge_delta.update_file import Writer
from atropos_core.errors import AtroposError, CheckpointError
from atropos_core.interfaces import WeightHolder
from atropos_torch_models.stored_tensors import stored_tensors
from atropos_torch_models.tensors import check_same, describe, tensors_of


class TrainerExtension:
    """Keeps one update at a time, in an unnamed file of the temporary directory, which disappears with this process however it ends."""

    def __init__(self, holder: WeightHolder) -> None:
        self._holder = holder
        self._copy: dict[str, Tensor] = {}  # on the CPU, as the engines have them
        self._stored = False  # they load files: tensors travel by the names and in the shapes of files
        self._state = ""  # which weights those are; empty while they are being written
        self._files: dict[str, BinaryIO] = {}  # by what an update is: "delta", "whole"

    async def open(self, engines: Sequence[Sequence[Any]] | None, dtype: str) -> dict[str, Any]:
        """Copy the trainer's weights, in the dtypes of `engines` (name, dtype and shape of each tensor) if given. Else in `dtype` ("auto":
        the trainer's own), named as in files of weights. Returns the same kind of list of what will travel, its state and the model's
        configuration. Raises WeightsMismatch if trainer and engines do not have the same tensors."""
        self._stored = engines is None
        if engines is not None:
            tensors = tensors_of(self._holder.model)
            check_same(engines, describe(tensors), "the trainer")
            self._copy = {name: _copied(tensors[name], named_dtype(kind)) for name, kind, _ in engines}
        else:
            kind = None if dtype == "auto" else named_dtype(dtype)
            self._copy = {
                name: _copied(one, kind if kind is not None and one.is_floating_point() else one.dtype)
                for name, one in self._tensors()
            }
        self._state = await asyncio.to_thread(digest, [bits(one) for one in self._copy.values()])
        config = getattr(self._holder.model, "config", None)
        return {
            "tensors": [list(one) for one in describe(self._copy)],
            "state": self._state,
            "config": config.to_json_string(use_diff=False) if config is not None else "{}",
        }

    async def encode(self) -> dict[str, Any]:
        """Encode what has changed since the copy was made, and bring the copy up to date. Returns the update's `base` (the state that it
        is for), the `state` after it, its `size` and `digest`, and how many of how many elements changed."""
        return await asyncio.to_thread(self._encode)

    async def whole(self) -> dict[str, Any]:
        """Encode the whole copy as an update for an engine in any state."""
        return await asyncio.to_thread(self._whole)

    async def read(self, kind: str, offset: int, length: int) -> bytes:
        file = self._files[kind]
        file.seek(offset)
        return file.read(length)

    async def digest(self) -> str:
        """Return the digest of every bit of the copy."""
        return await asyncio.to_thread(digest, [bits(one) for one in self._copy.values()])

    def _encode(self) -> dict[str, Any]:
        base, self._state = self._state, ""  # until all of it is written down, the copy is of no state
        if not base:
            raise AtroposError("an update before this one failed half-way: what the engines have is not known here.")
        numbers = {name: number for number, name in enumerate(self._copy)}
        with _written(file := self._anew("delta")):
            writer = Writer(file)
            for name, new in self._tensors():
                old = self._copy[name]
                writer.changes(numbers[name], bits(old), bits(new.to("cpu", old.dtype).contiguous()))
        self._state = hashlib.blake2b(f"{base} {writer.digest()}".encode(), digest_size=16).hexdigest()
        return self._facts("delta", writer, base)

    def _tensors(self) -> Iterable[tuple[str, Tensor]]:
        model = self._holder.model
        return stored_tensors(model) if self._stored else tensors_of(model).items()

    def _whole(self) -> dict[str, Any]:
        with _written(file := self._anew("whole")):
            writer = Writer(file)
            for number, one in enumerate(self._copy.values()):
                writer.whole(number, bits(one))
        return self._facts("whole", writer, "")

    def _facts(self, kind: str, writer: Writer, base: str) -> dict[str, Any]:
        return {
            "kind": kind,
            "base": base,
            "state": self._state,
            "size": writer.size_bytes,
            "digest": writer.digest(),
            "changed": writer.changed,
            "elements": sum(one.numel() for one in self._copy.values()),
            "least": writer.least_bytes,
        }

    def _anew(self, kind: str) -> BinaryIO:
        if kind in self._files:
            self._files.pop(kind).close()
        self._files[kind] = file = tempfile.TemporaryFile(prefix="atropos-delta-")  # noqa: SIM115 - read until the next
        return file


def _copied(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor.to("cpu", dtype, copy=True).contiguous()


@contextmanager
def _written(file: BinaryIO) -> Iterator[None]:
    """Raises CheckpointError if the disk is full."""
    try:
        yield
        file.flush()
    except OSError as error:
        raise CheckpointError(
            f"bridge 'delta' cannot write an update into {tempfile.gettempdir()}: {error}",
            remedy="Free some of that disk, or name another in TMPDIR. Then `atropos resume` this run: its checkpoints are intact.",
        ) from error

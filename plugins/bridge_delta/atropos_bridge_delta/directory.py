"""Updates of an engine that loads model directories: a copy of the model on the engine's own disk is changed, and loaded from there.

A separate server (vLLM) can only read whole models. It reads them from its local disk, and the link carries only what changed.
"""

from __future__ import annotations

import json
import mmap
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO

import torch
from safetensors import safe_open
from torch import Tensor

from atropos_bridge_delta import update_file
from atropos_bridge_delta.tensors import INTEGERS, bits, digest, named_dtype
from atropos_core.errors import WeightsMismatch
from atropos_core.storage.tempdirs import owned_prefix, sweep

ROLE = "delta"
_STORED = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "int64": "I64", "int32": "I32", "int16": "I16",
    "int8": "I8", "uint8": "U8", "bool": "BOOL",
}  # fmt: skip
_ALIGN = 8


class ModelDirectory:
    """One file of tensors (safetensors), written through a memory map, with a config.json next to it."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._directory: Path | None = None
        self._bits: list[Tensor] = []
        self._map: mmap.mmap

    def describe(self) -> None:
        return None

    async def begin(self, tensors: Sequence[Sequence[Any]], wanted: str, directory: str, config: str) -> str:
        """An engine of this run has loaded `directory`, so its weights are those. If they cannot be read here, or are other tensors
        than the trainer's, the engine will need a whole copy."""
        self.close()
        sweep(ROLE)
        self._directory = Path(tempfile.mkdtemp(prefix=owned_prefix(ROLE)))
        (self._directory / "config.json").write_text(config, encoding="utf-8")
        self._make(self._directory / "model.safetensors", tensors)
        known = directory and _fill(self._bits, tensors, Path(directory))
        return digest(self._bits) if known else ""

    async def apply(self, file: BinaryIO) -> None:
        assert self._directory is not None, "begin() comes first"
        update_file.apply(file, self._bits)
        self._map.flush()
        await self._engine.load_weights(self._directory)

    def digest(self) -> str:
        return digest(self._bits)

    def close(self) -> None:
        directory, self._directory = self._directory, None
        self._bits = []
        if directory is not None:
            shutil.rmtree(directory, ignore_errors=True)

    def _make(self, path: Path, tensors: Sequence[Sequence[Any]]) -> None:
        """A file of zeros with the right names: its form is of https://huggingface.co/docs/safetensors."""
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        end = 0
        for name, dtype, shape in tensors:
            if dtype not in _STORED:
                raise WeightsMismatch(f"{name!r} is {dtype}, which a file of safetensors cannot hold.")
            size = named_dtype(dtype).itemsize * torch.Size(shape).numel()
            header[name] = {"dtype": _STORED[dtype], "shape": list(shape), "data_offsets": [end, end + size]}
            end += size
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % _ALIGN)
        with path.open("w+b") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            file.truncate(8 + len(text) + end)
            file.flush()
            self._map = mmap.mmap(file.fileno(), 0)
        raw = torch.frombuffer(self._map, dtype=torch.uint8, offset=8 + len(text))
        offsets = [header[name]["data_offsets"] for name, _, _ in tensors]
        sizes = [named_dtype(dtype).itemsize for _, dtype, _ in tensors]
        self._bits = [raw[begin:end].view(INTEGERS[size]) for (begin, end), size in zip(offsets, sizes, strict=True)]


def _fill(into: Sequence[Tensor], tensors: Sequence[Sequence[Any]], directory: Path) -> bool:
    """Load a model directory's tensors in the dtypes that travel. Returns False if one is missing under its name or has another shape."""
    by_name = {
        name: (one, named_dtype(dtype), list(shape)) for one, (name, dtype, shape) in zip(into, tensors, strict=True)
    }
    found = set()
    for path in directory.glob("*.safetensors"):
        with safe_open(path, framework="pt") as stored:
            for name in stored.keys():  # noqa: SIM118 - not a dictionary
                if name not in by_name:
                    continue
                one, dtype, shape = by_name[name]
                tensor = stored.get_tensor(name)
                if list(tensor.shape) == shape:
                    one.copy_(bits(tensor.to(dtype).contiguous()))
                    found.add(name)
    return found == by_name.keys()

"""Named adapters of clients: what the server can hold and apply, and an error for each that it cannot."""

from __future__ import annotations

import json
import struct
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from atropos_core.errors import DataError, WeightsMismatch
from atropos_core.models.model_size import ModelSize, read
from atropos_core.storage.reading import json_object
from atropos_engine_vllm.adapter_worker import LEFT_OUT, OPEN
from atropos_engine_vllm.adapters import Adapters, Loaded
from atropos_engine_vllm.api import Api

HEAD = "lm_head"
NO_HEAD = "Train the adapter without the head: train_unembed=False in a Tinker client, head=False in AdapterSettings."
_WEIGHTS = "adapter_model.safetensors"
_PARTS = (".lora_A.weight", ".lora_B.weight")


@dataclass(frozen=True)
class AdapterFile:
    """The rank of a peft adapter, and the shapes of its tensors by the layer's name in the base model."""

    rank: int
    shapes: dict[str, dict[str, tuple[int, ...]]]  # layer: ".lora_A.weight": (rank, inputs)

    @property
    def adapts_head(self) -> bool:
        return any(layer.split(".")[-1] == HEAD for layer in self.shapes)


def read_adapter(directory: Path) -> AdapterFile:
    """Read what the files of an adapter say about it, without its weights. Raises DataError."""
    try:
        config = json_object(directory / "adapter_config.json")
        rank = max(int(config["r"]), *map(int, (config.get("rank_pattern") or {}).values()), 0)
        with (directory / _WEIGHTS).open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            header: dict[str, Any] = json.loads(file.read(length))
        shapes: dict[str, dict[str, tuple[int, ...]]] = {}
        for name, tensor in header.items():
            for part in _PARTS:
                if name.endswith(part):
                    layer = name.removesuffix(part).removeprefix("base_model.model.")
                    shapes.setdefault(layer, {})[part] = tuple(map(int, tensor["shape"]))
    except (
        OSError,
        ValueError,
        KeyError,
        TypeError,
        AttributeError,
        OverflowError,
        MemoryError,
        struct.error,
    ) as error:
        raise DataError(f"engine 'vllm' cannot read an adapter from {directory}: {error}") from error
    return AdapterFile(rank, shapes)


class NamedAdapters:
    """Adapters by the names that clients give them."""

    def __init__(self, api: Api, adapters: Adapters, model: Path, most_rank: int, raise_rank: str) -> None:
        """`raise_rank` is how to raise `most_rank`."""
        self._api = api
        self._adapters = adapters
        self._model = model
        self._size: ModelSize | None = None
        self._most_rank = most_rank
        self._raise_rank = raise_rank
        self._head = self._head_scores = False
        self._with_head: set[str] = set()

    async def open(self) -> None:
        """Prepare the server's workers."""
        self._size = read(self._model)
        results = (await self._api.post("/collective_rpc", {"method": OPEN}))["results"]
        self._head = all(one["head"] for one in results)
        self._head_scores = all(one["head_scores"] for one in results)

    async def add(self, directory: Path, name: str) -> None:
        """Raises DataError for a name that is taken, and for an adapter that vLLM cannot apply as a whole."""
        file = read_adapter(directory)
        self._check(file, directory, name)
        try:
            await self._adapters.add(directory, name, self._check_loaded)
        except WeightsMismatch as error:
            raise DataError(Exception.__str__(error), remedy=error.remedy) from error
        if file.adapts_head:
            self._with_head.add(name)

    async def remove(self, name: str) -> None:
        """Raises DataError for an unknown name."""
        self._with_head.discard(name)
        await self._adapters.remove(name)

    def of(self, name: str | None, *, scores: bool = False) -> Loaded | None:
        """Return the adapter; None for the base model. Raises DataError for an unknown name. With `scores`, raises NotImplementedError if
        vLLM would score a prompt wrongly with this adapter."""
        found = self._adapters.of(name)
        if scores and name in self._with_head and not self._head_scores:
            raise NotImplementedError(
                f"this vLLM server does not score prompts with an adapter of the head, and {name!r} has one. {NO_HEAD}"
            )
        return found

    def using(self, adapter: Loaded | None) -> AbstractAsyncContextManager[Loaded | None]:
        return self._adapters.using(adapter)

    async def _check_loaded(self, loaded: Loaded) -> None:
        body = {"method": LEFT_OUT, "args": [loaded.number]}
        results = (await self._api.post("/collective_rpc", body))["results"]
        if left_out := sorted({layer for one in results for layer in one}):
            raise DataError(
                f"vLLM would leave out {len(left_out)} layers of this adapter, such as {left_out[0]!r}.",
                remedy="Train the adapter without these layers, or use `--engine hf`.",
            )

    def _check(self, file: AdapterFile, directory: Path, name: str) -> None:
        if file.rank > self._most_rank:
            raise DataError(
                f"the adapter {name!r} has rank {file.rank}, and engine 'vllm' holds named adapters of rank {self._most_rank} at most.",
                remedy=f"{self._raise_rank} Or train adapters of a lower rank.",
            )
        if file.adapts_head and not self._head:
            raise DataError(
                f"the adapter {name!r} changes the head, and vLLM has no adapters of the head for models of this kind.",
                remedy=f"{NO_HEAD} Or use `--engine hf`.",
            )
        for layer, shapes in file.shapes.items():
            if (base := self._shape_of(layer)) is None or set(shapes) != set(_PARTS):
                continue
            there = (shapes[_PARTS[1]][0], shapes[_PARTS[0]][-1])
            if there != base:  # vLLM puts smaller matrices into a corner of the layer's, without an error
                raise DataError(
                    f"the adapter in {directory} is not one for this engine's model: {layer!r} is {list(there)} there, and {list(base)} in"
                    " the model.",
                    remedy="Trainer and engine must open the same model directory.",
                )

    def _shape_of(self, layer: str) -> tuple[int, ...] | None:
        """Return [outputs, inputs] of a layer of the base model. None: its files do not say."""
        if self._size is None:
            return None
        if layer == HEAD and self._size.tied:
            return self._size.vocabulary, self._size.hidden
        return self._size.tensors.get(f"{layer}.weight")

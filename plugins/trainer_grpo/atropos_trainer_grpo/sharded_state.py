"""The optimiser's state of several ranks in a checkpoint: each writes the parts that it has, by torch.distributed.checkpoint (DCP), and any
number of ranks, or one process, reads what it needs of them.

In the state itself, which rank 0 writes, the name that a tensor has in DCP's directory stands in its place.
"""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as distributed
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from atropos_core.errors import CheckpointError
from atropos_core.storage.atomic import WRITABLE
from atropos_core.storage.checkpoint import AS_WRITTEN

DIRECTORY = "trainer_state"

_INDEX = {  # what DCP's own index of a directory is made of
    "torch": {"Size", "float32"},
    "torch.serialization": {"_get_layout"},
    "torch.distributed.checkpoint.metadata": {
        "Metadata", "TensorStorageMetadata", "ChunkStorageMetadata", "TensorProperties", "_MEM_FORMAT_ENCODING",
        "StorageMeta", "MetadataIndex",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "pathlib": {"PosixPath"},
    "pathlib._local": {"PosixPath"},
}  # fmt: skip


def write(
    state: Mapping[str, Any], names: Sequence[str], masters: Sequence[Tensor | None], directory: Path
) -> dict[str, Any]:
    """Write this rank's part of an optimiser's `state`; collective. `names` and `masters` are of its parameters, in their order. Returns
    what rank 0 writes in addition. Raises CheckpointError on all ranks."""
    tensors: dict[str, Tensor] = {}

    def noted(kind: str, at: int, tensor: Tensor | None) -> Any:
        if tensor is None or tensor.ndim == 0:  # a count of updates, which all have
            return tensor
        tensors[f"{kind}.{names[at]}"] = tensor
        return f"{kind}.{names[at]}"

    made = _each({**state, "masters": masters}, noted)
    with _as_ours(f"the ranks' parts of the checkpoint in {directory} cannot be written", WRITABLE):
        save(tensors, storage_writer=FileSystemWriter(directory / DIRECTORY))
    return made


def are_named(state: Mapping[str, Any]) -> bool:
    """Return True if `write` made this state."""
    return any(isinstance(master, str) for master in state["masters"]) or any(
        isinstance(value, str) for entry in state["moments"].values() for value in entry.values()
    )


def read(state: Mapping[str, Any], parameters: Sequence[Tensor], directory: Path) -> dict[str, Any]:
    """Read a `state` that `write` returned, with its tensors: of each, this rank's part. Collective. Raises CheckpointError on all
    ranks."""
    tensors: dict[str, Tensor] = {}

    def made(kind: str, at: int, saved: Any) -> Any:
        if not isinstance(saved, str):
            return saved
        tensors[saved] = torch.empty_like(parameters[at].detach(), dtype=torch.float32)
        return tensors[saved]

    whole = _each(state, made)
    with _as_ours(f"the trainer's checkpoint in {directory} cannot be read", AS_WRITTEN):
        load(tensors, storage_reader=_Reader(directory / DIRECTORY), no_dist=not distributed.is_initialized())
    return whole


def _each(state: Mapping[str, Any], change: Callable[[str, int, Any], Any]) -> dict[str, Any]:
    """Return the state with each master and moment replaced by `change(kind, number of its parameter, value)`."""
    masters = [change("master", at, value) for at, value in enumerate(state["masters"])]
    moments = {
        at: {kind: change(kind, at, value) for kind, value in entry.items()} for at, entry in state["moments"].items()
    }
    return {**state, "masters": masters, "moments": moments}


@contextmanager
def _as_ours(what: str, remedy: str) -> Iterator[None]:
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # one process reads for itself
            yield
    except CheckpointException as error:  # no Exception: it would end a process
        rank, (cause, _) = min(error.failures.items())
        raise CheckpointError(f"{what}: rank {rank}: {type(cause).__name__}: {cause}.", remedy=remedy) from error


class _Reader(FileSystemReader):
    """Reads directories that are not trusted. torch's own reader would run code in their index, which is a pickle."""

    def read_metadata(self, *arguments: Any, **keywords: Any) -> Metadata:
        with open(f"{self.path}/.metadata", "rb") as file:
            index: Metadata = _Unpickler(file).load()
        index.storage_meta = StorageMeta(load_id=self.load_id)
        return index


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if name not in _INDEX.get(module, ()):
            raise pickle.UnpicklingError(f"{module}.{name} is no part of DCP's index")
        return super().find_class(module, name)

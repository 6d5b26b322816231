"""Named checkpoints of models: adapter directories as peft writes them, with one more file next to the weights."""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from atropos_core.errors import DataError
from atropos_core.storage.atomic import size_bytes
from atropos_tinker_api.refused import Refused
from atropos_tinker_api.state.directory import read_json, write_json

SCHEME = "tinker://"
ABOUT = "checkpoint.json"
TRAINING, SAMPLER = "weights", "sampler_weights"  # the middle part of a path, and the folder in the model's directory
TYPES = {TRAINING: "training", SAMPLER: "sampler"}
NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}")
SHORTEST_TTL_S, LONGEST_TTL_S = 3600, 10 * 366 * 86_400


@dataclass(frozen=True)
class Checkpoint:
    """The description of a checkpoint, next to its weights. `seq`: the request that wrote it."""

    model_id: str
    folder: str  # TRAINING or SAMPLER
    name: str
    seq: int
    created: float
    base_model: str
    settings: Mapping[str, Any]  # an AdapterSettings
    user_metadata: Mapping[str, str] | None = None
    expires: float | None = None
    size_bytes: int = 0

    @property
    def path(self) -> str:
        return f"{SCHEME}{self.model_id}/{self.folder}/{self.name}"

    @property
    def is_expired(self) -> bool:
        return self.expires is not None and self.expires <= time.time()

    def write(self, directory: Path) -> None:
        """Write the description into the checkpoint's directory, which has the weights."""
        write_json(directory / ABOUT, asdict(replace(self, size_bytes=size_bytes(directory))))


class Checkpoints:
    """The checkpoints in the directories of models."""

    def __init__(self, models: Path) -> None:
        self._models = models

    def find(self, path: str) -> Checkpoint:
        """Return the checkpoint at a tinker:// path. Raises Refused."""
        model, folder, name = parts_of(path)
        checkpoint = self.at(self.directory(model, folder, name))
        if checkpoint is None:
            raise Refused(f"this server has no checkpoint {path[:300]!r}.", status=404)
        return checkpoint

    def directory(self, model_id: str, folder: str, name: str) -> Path:
        return self._models / folder_of(model_id) / folder / name

    def directory_of(self, checkpoint: Checkpoint) -> Path:
        return self.directory(checkpoint.model_id, checkpoint.folder, checkpoint.name)

    def of_model(self, model_id: str) -> list[Checkpoint]:
        """Return the checkpoints of a model, the newest first."""
        found = self._in(self._models / folder_of(model_id))
        return sorted(found, key=lambda one: (one.created, one.path), reverse=True)

    def newest_first(self) -> list[Checkpoint]:
        found = [one for model in self._models.iterdir() for one in self._in(model)]
        return sorted(found, key=lambda one: (one.created, one.path), reverse=True)

    def delete(self, checkpoint: Checkpoint) -> None:
        directory = self.directory_of(checkpoint)
        (directory / ABOUT).unlink(missing_ok=True)  # first: without it, the directory is not a checkpoint
        shutil.rmtree(directory, ignore_errors=True)

    def expired(self) -> list[Path]:
        """Return the directories of checkpoints whose time to live is over. Changes nothing, so it may run in a thread."""
        found = [file.parent for kind in TYPES for file in self._models.glob(f"*/{kind}/[!.]*/{ABOUT}")]
        return [directory for directory in found if Checkpoint(**read_json(directory / ABOUT)).is_expired]

    def expire(self, checkpoint: Checkpoint, ttl_seconds: int | None) -> None:
        replace(checkpoint, expires=expiry(ttl_seconds)).write(self.directory_of(checkpoint))

    def _in(self, model: Path) -> Iterator[Checkpoint]:
        for folder in TYPES:
            for directory in (model / folder).glob("[!.]*") if (model / folder).is_dir() else ():
                if (found := self.at(directory)) is not None:
                    yield found

    def at(self, directory: Path) -> Checkpoint | None:
        """Return the checkpoint in a directory, unless there is none or it has expired."""
        if not (directory / ABOUT).is_file():
            return None
        checkpoint = Checkpoint(**read_json(directory / ABOUT))
        if checkpoint.is_expired:
            self.delete(checkpoint)
            return None
        return checkpoint


def folder_of(id: str) -> str:
    """Return the name of the folder of a model or a sampler."""
    return id.replace(":", "-")


def parts_of(path: str) -> tuple[str, str, str]:
    """Return model, folder and name of a tinker:// path. Raises Refused."""
    model, _, rest = path.removeprefix(SCHEME).partition("/")
    folder, _, name = rest.partition("/")
    is_model = re.fullmatch(r"[0-9a-f]{16}:train:[0-9]{1,9}", model)
    if not path.startswith(SCHEME) or not is_model or folder not in TYPES or not NAME.fullmatch(name):
        raise Refused(
            f"{path[:300]!r} is not the path of a checkpoint: it has the form tinker://MODEL_ID/weights/NAME or "
            "tinker://MODEL_ID/sampler_weights/NAME."
        )
    return model, folder, name


def check_name(name: str) -> str:
    """Raises DataError."""
    if not NAME.fullmatch(name):
        raise DataError(
            f"{name[:100]!r} cannot be the name of a checkpoint.",
            remedy="Use up to 128 letters, digits, dots, underscores and hyphens, and no dot or hyphen first.",
        )
    return name


def expiry(ttl_seconds: int | None) -> float | None:
    """Return when a checkpoint expires. Raises DataError."""
    if ttl_seconds is None:
        return None
    if not SHORTEST_TTL_S <= ttl_seconds <= LONGEST_TTL_S:
        raise DataError("ttl_seconds is between 1 hour (3600) and 10 years.")
    return time.time() + ttl_seconds

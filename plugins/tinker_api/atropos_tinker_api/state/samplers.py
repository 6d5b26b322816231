"""Sampling sessions. Each samples from a fixed adapter, or from the base model, and has a directory."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from atropos_core.storage.atomic import appearing
from atropos_tinker_api.refused import Refused, unknown
from atropos_tinker_api.state.checkpoints import Checkpoint, Checkpoints, folder_of
from atropos_tinker_api.state.directory import read_json, write_json

ABOUT = "sampler.json"


@dataclass(frozen=True)
class Sampler:
    """`path`: the checkpoint that it samples from. `has_own`: its weights are in its own directory. Neither: the base model."""

    id: str
    base_model: str
    path: str | None = None
    has_own: bool = False


class Samplers:
    """All sampling sessions of the server."""

    def __init__(self, directory: Path, checkpoints: Checkpoints) -> None:
        self._directory = directory
        self._checkpoints = checkpoints
        found = (read_json(path) for path in directory.glob(f"*/{ABOUT}"))
        self._samplers = {one["id"]: Sampler(**one) for one in found}

    def id_of(self, session_id: str, seq: int) -> str:
        return f"{session_id}:sample:{seq}"

    def create(self, session_id: str, seq: int, base_model: str, path: str | None) -> Sampler:
        """Create a sampling session. A repeated request changes nothing. Raises Refused."""
        sampler = Sampler(self.id_of(session_id, seq), base_model, path)
        known = self._samplers.get(sampler.id)
        if known is not None:
            if known != sampler:
                raise Refused(f"sampling_session_seq_id {seq} of session {session_id} is that of another request.")
            return known
        with appearing(self._directory / folder_of(sampler.id), durable=False) as directory:
            write_json(directory / ABOUT, asdict(sampler))
        self._samplers[sampler.id] = sampler
        return sampler

    @contextmanager
    def adding(self, id: str, base_model: str) -> Iterator[Path]:
        """Yield a directory to save an adapter into. After the block there is a sampler of it."""
        sampler = Sampler(id, base_model, has_own=True)
        if (known := self._samplers.get(id)) is not None and known != sampler:
            raise Refused(f"{id} is already a sampling session.")
        with appearing(self._directory / folder_of(id), durable=False) as directory:
            weights = directory / "adapter"
            weights.mkdir()
            yield weights
            write_json(directory / ABOUT, asdict(sampler))
        self._samplers[id] = sampler

    def find(self, id: str) -> Sampler:
        """Raises Refused."""
        if id not in self._samplers:
            raise unknown("sampling session", id)
        return self._samplers[id]

    def weights(self, sampler: Sampler) -> Path | None:
        """Return the directory of its adapter, None for the base model. Raises Refused if the checkpoint was deleted."""
        if sampler.has_own:
            return self._directory / folder_of(sampler.id) / "adapter"
        if sampler.path is None:
            return None
        return self._checkpoints.directory_of(self.checkpoint(sampler.path))

    def checkpoint(self, path: str) -> Checkpoint:
        """Return the checkpoint with weights to sample from: any of them. Raises Refused."""
        return self._checkpoints.find(path)

    def of_session(self, session_id: str) -> list[str]:
        return [id for id in self._samplers if id.startswith(f"{session_id}:")]

    def drop_session(self, session_id: str) -> list[str]:
        """Remove the sampling sessions of a finished session, with the weights that only they have. Return their ids."""
        dropped = self.of_session(session_id)
        for id in dropped:
            del self._samplers[id]
            shutil.rmtree(self._directory / folder_of(id), ignore_errors=True)
        return dropped

"""Sampling sessions. Each samples from a fixed adapter, or from the base model, and has a directory."""

from __future__ import annotations

import shutil
from collections import OrderedDict
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from atropos_core.storage.atomic import appearing
from atropos_tinker_api.refused import Refused
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
    """All sampling sessions of the server. One session has at most `most_snapshots` with saved weights: a new one replaces the one that was
    used longest ago."""

    def __init__(self, directory: Path, checkpoints: Checkpoints, most_snapshots: int) -> None:
        self._directory = directory
        self._checkpoints = checkpoints
        self._most = most_snapshots
        found = sorted(directory.glob(f"*/{ABOUT}"), key=lambda path: path.stat().st_mtime_ns)
        samplers = (Sampler(**read_json(path)) for path in found)
        self._samplers = OrderedDict((one.id, one) for one in samplers)  # the last used one last

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
        self._samplers.move_to_end(id)
        session = session_of(id)
        own = [one.id for one in self._samplers.values() if one.has_own and session_of(one.id) == session]
        for oldest in own[: -self._most]:
            self._remove(oldest)

    def find(self, id: str) -> Sampler:
        """Return a sampling session that is about to be used. Raises Refused."""
        if id not in self._samplers:
            raise Refused(
                f"this server has no sampling session {id[:200]!r}. A snapshot is removed when its session is finished or silent for "
                "long (--snapshot-hours), and when the session has newer ones (--snapshots).",
                status=404,
            )
        self._samplers.move_to_end(id)
        return self._samplers[id]

    def weights(self, sampler: Sampler) -> Path | None:
        """Return the directory of its adapter, None for the base model. Raises Refused if it was removed, or its checkpoint deleted."""
        self.find(sampler.id)
        if sampler.has_own:
            return self._directory / folder_of(sampler.id) / "adapter"
        if sampler.path is None:
            return None
        return self._checkpoints.directory_of(self.checkpoint(sampler.path))

    def checkpoint(self, path: str) -> Checkpoint:
        """Return the checkpoint with weights to sample from: any of them. Raises Refused."""
        return self._checkpoints.find(path)

    def of_session(self, session_id: str) -> list[str]:
        return [id for id in self._samplers if session_of(id) == session_id]

    def remove_of(self, sessions: Collection[str]) -> None:
        """Remove the sampling sessions of these sessions, with the weights that only they have."""
        for id in [id for id in self._samplers if session_of(id) in sessions]:
            self._remove(id)

    def _remove(self, id: str) -> None:
        del self._samplers[id]
        shutil.rmtree(self._directory / folder_of(id), ignore_errors=True)


def session_of(id: str) -> str:
    """Return the session of a sampling session."""
    return id.partition(":")[0]

"""All models of the server."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from atropos_core.errors import HubFull
from atropos_tinker_api.refused import Refused, unknown
from atropos_tinker_api.state.journal import Kind
from atropos_tinker_api.state.model import ABOUT, Model, ModelRecord


class Models:
    """Opens those that an earlier server left. `most_pending_bytes`: of requests that were accepted and not carried out."""

    def __init__(self, directory: Path, most_pending_bytes: int) -> None:
        self._directory = directory
        self._most = most_pending_bytes
        found = (Model.open(path.parent) for path in sorted(directory.glob(f"*/{ABOUT}")))
        self._models = {model.id: model for model in found}

    def create(self, record: ModelRecord) -> Model:
        """Create a model. A repeated request changes nothing. Raises Refused."""
        if (known := self._models.get(record.id)) is not None:
            if known.record != record_like(record, known.record):
                raise Refused(f"model {record.id} was created by another request.")
            return known
        self._models[record.id] = Model.create(record, self._directory)
        return self._models[record.id]

    def find(self, id: str) -> Model:
        """Raises Refused."""
        if id not in self._models:
            raise unknown("model", id)
        return self._models[id]

    def accept(self, model: Model, kind: Kind, seq: int, body: bytes) -> None:
        """Keep a request to a model. The one that is next always has room: others may wait for it. Raises Refused, HubFull."""
        if seq < 1:
            raise Refused(f"seq_id {seq} is not possible: a model's requests count from 1.")
        held = sum(one.pending_bytes for one in self._models.values())
        if held + len(body) > self._most and seq != model.next_seq:
            raise HubFull(
                f"requests of {held / 1e6:.0f} MB wait for the trainer.",
                remedy="Send it again in a moment; `atropos tinker --queue-mb` sets the bound.",
            )
        model.accept(kind, seq, body)

    def all(self) -> list[Model]:
        """Return the models, the one with the latest request first."""
        return sorted(self._models.values(), key=lambda one: (one.last_request, one.id), reverse=True)

    def of_session(self, session_id: str) -> list[str]:
        return [id for id, model in self._models.items() if model.record.session_id == session_id]

    def close(self) -> None:
        for model in self._models.values():
            model.close()


def record_like(record: ModelRecord, known: ModelRecord) -> ModelRecord:
    """Return `record` with what the server chose for `known`, so that the rest can be compared."""
    return replace(record, created=known.created, settings=replace(record.settings, seed=known.settings.seed))

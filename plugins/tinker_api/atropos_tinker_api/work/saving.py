"""Saving adapters under a name, and for samplers."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import orjson

from atropos_core.errors import DataError
from atropos_core.stepwise import AdapterSettings, StepwiseTrainer
from atropos_core.storage.atomic import appearing
from atropos_tinker_api.http.fields import Fields
from atropos_tinker_api.refused import Refused
from atropos_tinker_api.state.checkpoints import SAMPLER, TRAINING, Checkpoint, Checkpoints, check_name, expiry
from atropos_tinker_api.state.journal import Kind
from atropos_tinker_api.state.model import Model
from atropos_tinker_api.state.samplers import Samplers


class Saving:
    """Writes checkpoints, and finds those that a model begins from."""

    def __init__(self, checkpoints: Checkpoints, samplers: Samplers) -> None:
        self._checkpoints = checkpoints
        self._samplers = samplers

    def source(self, path: str) -> Path:
        """Return the directory of a checkpoint with an optimizer's state. Raises Refused."""
        checkpoint = self._checkpoints.find(path)
        if checkpoint.folder != TRAINING:
            raise Refused(
                f"{path} has weights for sampling, and no optimizer's state: it cannot be trained. Name one that save_state wrote."
            )
        return self._checkpoints.directory_of(checkpoint)

    async def save(self, trainer: StepwiseTrainer, model: Model, kind: Kind, body: bytes) -> Mapping[str, Any]:
        """Carry out save_weights or save_weights_for_sampler. Raises DataError, Refused."""
        given = Fields(orjson.loads(body))
        name = given.text_or_none("path")
        if kind == Kind.SAVE_WEIGHTS:
            overwrite = given.truth("overwrite", False)
            if name is None:
                raise DataError("path is missing: it is the name of the checkpoint.")
            path = await self._named(trainer, model, TRAINING, name, given, overwrite=overwrite)
            return {"path": path, "type": "save_weights"}
        if (how := given.text("kind", "snapshot")) != "snapshot":
            raise DataError(
                f"a sampling client of kind {how[:50]!r} is not one of this server's.", remedy='Use kind="snapshot".'
            )
        if name is not None:
            path = await self._named(trainer, model, SAMPLER, name, given, overwrite=False)
            return {"path": path, "type": "save_weights_for_sampler"}
        seq = given.integer("sampling_session_seq_id", least=0)
        sampler = self._samplers.id_of(model.record.session_id, seq)
        with self._samplers.adding(sampler, model.record.base_model) as directory:
            await trainer.save_adapter(directory, model.id, False)
        return {"sampling_session_id": sampler, "type": "save_weights_for_sampler"}

    async def _named(
        self, trainer: StepwiseTrainer, model: Model, folder: str, name: str, given: Fields, *, overwrite: bool
    ) -> str:
        """Save under a name, and return the path. A request that was carried out just before a kill is carried out again."""
        directory = self._checkpoints.directory(model.id, folder, check_name(name))
        checkpoint = Checkpoint(
            model_id=model.id,
            folder=folder,
            name=name,
            seq=model.next_seq,
            created=time.time(),
            base_model=model.record.base_model,
            settings=asdict(model.record.settings),
            user_metadata=given.metadata("user_metadata"),
            expires=expiry(given.integer_or_none("ttl_seconds")),
        )
        existing = self._checkpoints.at(directory)
        if existing is not None and existing.seq != model.next_seq and not overwrite:
            advice = "Choose another name, or pass overwrite=True." if folder == TRAINING else "Choose another name."
            raise Refused(f"model {model.id} has a checkpoint {name!r} already. {advice}")
        directory.parent.mkdir(exist_ok=True)
        with appearing(directory) as partial:
            await trainer.save_adapter(partial, model.id, folder == TRAINING)
            checkpoint.write(partial)
        return checkpoint.path


def settings_of(checkpoint: Checkpoint) -> AdapterSettings:
    return AdapterSettings(**checkpoint.settings)

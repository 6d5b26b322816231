"""The bridge's extension in the trainer's process."""

from __future__ import annotations

import uuid

from atropos_tinker_client.service import WORK_S, answer
from atropos_tinker_client.trainer import TinkerTrainer


class TrainerExtension:
    """Has the server save the trainer's present weights for sampling."""

    def __init__(self, trainer: TinkerTrainer) -> None:
        self._trainer = trainer

    async def save(self, version: int, ttl_hours: float) -> str:
        """Return the path of the saved weights at the server."""
        name = f"atropos-v{version}-{uuid.uuid4().hex[:8]}"
        saving = self._trainer.client.save_weights_for_sampler(name, ttl_seconds=int(3600 * ttl_hours))
        saved = await answer("weights for sampling", saving, WORK_S)
        return str(saved.path)

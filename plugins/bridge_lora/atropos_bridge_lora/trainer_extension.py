"""The bridge's extension in the trainer's process."""

from __future__ import annotations

import asyncio
import copy
from pathlib import Path
from typing import Any

from peft import PeftModel, get_peft_model_state_dict
from safetensors import SafetensorError
from safetensors.torch import save_file

from atropos_core.errors import CheckpointError, WeightsMismatch
from atropos_core.interfaces import WeightHolder
from atropos_core.storage.atomic import WRITABLE, appearing, size_bytes


class TrainerExtension:
    """Writes the adapter that the trainer holds."""

    def __init__(self, holder: WeightHolder) -> None:
        self._holder = holder

    async def check(self) -> None:
        if not isinstance(self._holder.model, PeftModel):
            raise WeightsMismatch(
                f"bridge 'lora' moves peft adapters, and the trainer's model is a bare {type(self._holder.model).__name__}.",
                remedy="Use a trainer that trains an adapter over the transport 'adapter', as `--trainer grpo` does.",
            )

    async def save(self, directory: str) -> int:
        """Make a peft adapter directory, and return its size in bytes. Raises CheckpointError if it cannot be written."""
        return await asyncio.to_thread(_save, self._holder.model, Path(directory))


def _save(model: Any, directory: Path) -> int:
    # As model.save_pretrained, without a README and without asking the hub about the base model's vocabulary.
    settings = copy.copy(model.peft_config["default"])
    settings.inference_mode = True
    tensors = get_peft_model_state_dict(model, save_embedding_layers=False)
    try:
        with appearing(directory, durable=False) as partial:  # what outlives a power cut is the checkpoint
            settings.save_pretrained(partial)
            save_file(
                {name: tensor.contiguous() for name, tensor in tensors.items()}, partial / "adapter_model.safetensors"
            )
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"bridge 'lora' cannot write the adapter {directory}: {error}",
            remedy=f"{WRITABLE} Then `atropos resume` this run: its checkpoints are intact.",
        ) from error
    return size_bytes(directory)

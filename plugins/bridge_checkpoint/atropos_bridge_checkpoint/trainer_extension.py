"""The bridge's extension in the trainer's process."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from transformers import PreTrainedModel

from atropos_core.errors import CheckpointError, WeightsMismatch
from atropos_core.interfaces import WeightHolder
from atropos_core.storage.atomic import WRITABLE, appearing, size_bytes

WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf", "*.h5", "*.msgpack", "*.onnx", "*.index.json")


class TrainerExtension:
    """Writes the model that the trainer holds."""

    def __init__(self, holder: WeightHolder) -> None:
        self._holder = holder

    async def save(self, directory: str, origin: str) -> int:
        """Make a model directory that any engine loads: weights and config in Hugging Face form, and the other files
        of `origin` (the tokenizer). Returns its size in bytes. Raises CheckpointError if it cannot be written."""
        model = self._holder.model
        if not isinstance(model, PreTrainedModel):
            raise WeightsMismatch(
                f"bridge 'checkpoint' saves transformers models, and the trainer's is a {type(model).__name__}.",
                remedy="For adapters use --bridge lora.",
            )
        return await asyncio.to_thread(_save, model, Path(directory), Path(origin))


def _save(model: Any, directory: Path, origin: Path) -> int:
    try:
        with appearing(directory) as partial:
            implementation = model.config._attn_implementation  # which save_pretrained forgets
            model.save_pretrained(partial)
            model.config._attn_implementation = implementation
            for path in origin.iterdir():
                if (
                    path.is_file()
                    and not any(path.match(kind) for kind in WEIGHTS)
                    and not (partial / path.name).exists()
                ):
                    shutil.copy2(path, partial)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"bridge 'checkpoint' cannot write {directory}: {error}",
            remedy=f"{WRITABLE} Then `atropos resume` this run: its checkpoints are intact.",
        ) from error
    return size_bytes(directory)

"""The files of a tokenizer, which a saved model takes from the model that it was trained from."""

from __future__ import annotations

import shutil
from pathlib import Path

PATTERNS = (
    "tokenizer*", "vocab*", "merges.txt", "special_tokens_map.json", "added_tokens.json", "chat_template*",
    "additional_chat_templates", "generation_config.json", "spiece.model",
)  # fmt: skip


def copy(origin: Path, directory: Path) -> None:
    """Copy them from one model directory to another."""
    for pattern in PATTERNS:
        for path in origin.glob(pattern):
            (shutil.copytree if path.is_dir() else shutil.copy2)(path, directory / path.name)

"""Tiny models of every family, with random weights and the tokenizer of the tiny policy."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import transformers

from atropos_core.builtin.plugin import TOY_MODEL
from atropos_torch_models.small_model import small_model
from tests.models.families import config_of

TOKENIZER = (
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "generation_config.json",
    "special_tokens_map.json",
)


@pytest.fixture
def model_of(tmp_path: Path) -> Callable[[str], Path]:
    """Save the small model of a family, as a directory that a user would name."""

    def made(name: str) -> Path:
        directory = tmp_path / name
        model = small_model(config_of(name))
        transformers.logging.set_verbosity_error()
        model.save_pretrained(directory)
        for file in TOKENIZER:
            if (TOY_MODEL / file).exists():
                shutil.copy(TOY_MODEL / file, directory)
        return directory

    return made

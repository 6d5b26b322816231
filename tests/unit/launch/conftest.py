"""The shape of a small real model, which takes no disk."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.shapes import write_shape


@pytest.fixture(scope="session")
def smollm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_shape("HuggingFaceTB/SmolLM2-135M-Instruct", tmp_path_factory.mktemp("smollm"))

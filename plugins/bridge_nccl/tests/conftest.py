from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from tests.scenes import scenes


@pytest.fixture
async def open_scene(tmp_path: Path) -> AsyncIterator[Callable[..., Any]]:
    async with scenes(tmp_path, "nccl", {"learning_rate": 3e-3}) as start:
        yield start

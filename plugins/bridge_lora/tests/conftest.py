"""Engine "hf" and trainer "grpo" in processes of their own on the tiny policy, joined by the bridge."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from atropos_core import config
from atropos_core.assemble import Parts, build, make_plan
from atropos_core.plugins import load_plugins
from atropos_core.testing.scenes import Scene, connect

EVERYTHING = {"lora": {"rank": 8}, "learning_rate": 1e-3}


@pytest.fixture
async def open_scene(tmp_path: Path) -> AsyncIterator[Callable[..., Any]]:
    """`await open_scene(trainer={...}, bridge={...})`, closed at the end."""
    opened: list[Parts] = []

    async def start(trainer: Any = EVERYTHING, bridge: Any = None, replicas: int = 0, **training: Any) -> Scene:
        values = {
            "engine": {"use": "hf", "threads": 1, "replica": {f"n{i}": {} for i in range(replicas)}},
            "trainer": {"use": "grpo", "threads": 1, **trainer},
            "bridge": {"use": "lora", **(bridge or {})},
            "training": training,
            "environment": {"none": {"use": "atropos_core.testing.samples:NoEnvironment"}},
            "sink": {},
        }
        plugins = load_plugins()
        loaded = config.load([config.Layer("test", values)]).config
        plan = make_plan(loaded, plugins.resolve_model("tiny"), plugins)
        (tmp_path / "logs").mkdir(exist_ok=True)
        opened.append(parts := await build(plan, tmp_path))
        return await connect(plan, parts)

    yield start
    for parts in opened:
        assert not await parts.close()

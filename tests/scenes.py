"""Bridges between two real processes: engine "hf" in some, trainer "grpo" in another, on the tiny policy."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np

from atropos_core.config import run_file as config
from atropos_core.launch.builder import build
from atropos_core.launch.plan import make_plan
from atropos_core.plugins.manager import load_plugins
from atropos_core.training.parts import Parts
from atropos_core.types import Sampling
from atropos_testing.bridge_setup import Scene, connect


@asynccontextmanager
async def scenes(directory: Path, name: str, trainer: Mapping[str, Any]) -> AsyncIterator[Callable[..., Any]]:
    """`await open_scene()`: bridge `name`, and a trainer with these options or with others (`trainer={...}`). All are closed."""
    opened: list[Parts] = []

    async def start(
        trainer: Mapping[str, Any] = trainer,
        bridge: Mapping[str, Any] | None = None,
        replicas: int = 0,
        engine: Mapping[str, Any] | None = None,
        **training: Any,
    ) -> Scene:
        values = {
            "engine": {"use": "hf", "threads": 1, **(engine or {}), "replica": {f"n{i}": {} for i in range(replicas)}},
            "trainer": {"use": "grpo", "threads": 1, **trainer},
            "bridge": {"use": name, **(bridge or {})},
            "training": training,
            "environment": {"none": {"use": "atropos_testing.samples:TwoSums"}},
            "sink": {},
        }
        plugins = load_plugins()
        loaded = config.load([config.Layer("test", values, whole=True)]).config
        plan = make_plan(loaded, plugins.resolve_model("tiny"), plugins)
        (directory / "logs").mkdir(exist_ok=True)
        opened.append(parts := await build(plan, directory))
        return await connect(plan, parts)

    yield start
    for parts in opened:
        assert not await parts.close()


async def differences(scene: Scene) -> list[float]:
    """Trainer against each engine, over what the engine samples now."""
    apart = []
    for engine in scene.parts.engines:
        made = await engine.sample(scene.prompt, 4, Sampling(max_tokens=24), range(4), 60)
        for completion in made:
            [scores] = await scene.parts.trainer.logprobs([np.concatenate([scene.prompt, completion.tokens])])
            apart.append(float(np.abs(scores[len(scene.prompt) :] - completion.logprobs).max()))
    return apart


async def update(scene: Scene, version: int) -> None:
    batch = await scene.batch(version)
    await scene.parts.trainer.step(batch, lambda: scene.parts.bridge.writing(version))

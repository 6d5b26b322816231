"""A real bridge between a real vLLM and the real trainer, as a run builds them, and what is measured across it.

`make soak` and the benchmark use it as well.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from atropos_core.config import run_file as config
from atropos_core.interfaces import ModelInfo
from atropos_core.launch.builder import build
from atropos_core.launch.plan import Plan, make_plan
from atropos_core.plugins.manager import load_plugins
from atropos_core.plugins.provider import ResolvedModel
from atropos_core.training.batch import to_batch
from atropos_core.training.parts import Parts
from atropos_core.types import Batch, Completion, Draw, Episode, Metrics, Rollout, Sampling, ScoredGroup, Task, Tokens
from tests.vllm.hosted import DEVICE

DEADLINE_S = 120.0
GROUP = 8


@dataclass
class Ends:
    """Both ends are open, the bridge is connected; `prompts` are i32[T] each."""

    plan: Plan
    parts: Parts
    info: ModelInfo
    prompts: list[Tokens]
    version: int = 0
    seeds: Any = field(default_factory=lambda: np.random.default_rng(7))

    async def sample(self, prompt: Tokens, sampling: Sampling, n: int = 1) -> list[Completion]:
        seeds = [int(seed) for seed in self.seeds.integers(2**31, size=n)]
        return await self.parts.engine.sample(prompt, n, sampling, seeds, DEADLINE_S)

    async def batch(self, sampling: Sampling) -> Batch:
        """A group of each prompt, with advantages drawn at random."""
        sampled = await asyncio.gather(*(self.sample(prompt, sampling, GROUP) for prompt in self.prompts))
        groups = [
            group_of(number, prompt, completions, self.seeds.normal(size=GROUP))
            for number, (prompt, completions) in enumerate(zip(self.prompts, sampled, strict=True))
        ]
        return to_batch(groups, self.version + 1)

    async def update(self, sampling: Sampling) -> Metrics:
        """Sample, train, publish."""
        batch = await self.batch(sampling)
        version = self.version + 1
        metrics = await self.parts.trainer.step(batch, lambda: self.parts.bridge.writing(version))
        self.version = version
        return metrics

    async def difference(self, sampling: Sampling) -> float:
        """The largest |trainer - engine| logprob over freshly sampled tokens, nats; all must carry the last version."""
        largest = 0.0
        sampled = await asyncio.gather(*(self.sample(prompt, sampling, 2) for prompt in self.prompts))
        for prompt, completions in zip(self.prompts, sampled, strict=True):
            whole = [np.concatenate([prompt, completion.tokens]) for completion in completions]
            scores = await self.parts.trainer.logprobs(whole, sampling.temperature or 1.0)
            for completion, score in zip(completions, scores, strict=True):
                assert set(completion.policy_version.tolist()) == {self.version}
                apart = np.abs(score[len(prompt) :] - completion.logprobs)
                largest = float(np.max([largest, *apart]))  # NaN stays, which Python's max would lose
        return largest


def group_of(number: int, prompt: Tokens, completions: Sequence[Completion], advantages: Any) -> ScoredGroup:
    episodes = []
    for completion in completions:
        tokens = np.concatenate([prompt, completion.tokens]).astype(np.int32)
        sampled = np.arange(len(tokens)) >= len(prompt)
        before = np.zeros(len(prompt))
        episodes.append(
            Episode(
                (
                    Rollout(
                        tokens=tokens,
                        sampled=sampled,
                        trained=sampled,
                        logprobs=np.concatenate([before, completion.logprobs]).astype(np.float32),
                        policy_version=np.concatenate([before, completion.policy_version]).astype(np.int32),
                        temperature=completion.temperature,
                    ),
                ),
                score=0.0,
            )
        )
    task = Task(f"prompt-{number}", ())
    draw = Draw(number, "random", "train", number, number)
    made = ScoredGroup(draw, task, tuple(episodes), np.zeros(len(episodes), np.float32))
    return made.with_advantages(np.asarray(advantages, np.float32))


def plan_of(model: Path, bridge: str, changes: dict[str, Any] | None = None) -> Plan:
    """`changes` are over sections: {"engine": {...}, "trainer": {...}, "bridge": {...}, "training": {...}}."""
    values: dict[str, Any] = {
        "engine": {"use": "vllm", "threads": 1, "devices": [DEVICE]},
        "trainer": {"use": "grpo", "threads": 1, "devices": [DEVICE], "learning_rate": 1e-2, "max_grad_norm": 10.0},
        "bridge": {"use": bridge},
        "environment": {"none": {"use": "atropos_testing.samples:TwoSums"}},
        "sink": {},
    }
    for section, different in (changes or {}).items():
        values[section] = {**values.get(section, {}), **different}
    return make_plan(
        config.load([config.Layer("test", values, whole=True)]).config, ResolvedModel(model, model.name), load_plugins()
    )


@asynccontextmanager
async def opened(plan: Plan, directory: Path) -> AsyncIterator[tuple[Parts, ModelInfo]]:
    """Both ends open, their extensions loaded; the bridge not yet connected."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "logs").mkdir(exist_ok=True)
    parts = await build(plan, directory)
    try:
        info, *_ = await asyncio.gather(parts.trainer.open(), *(engine.open() for engine in parts.engines))
        extensions = parts.bridge.extensions()
        if "trainer" in extensions:
            await parts.trainer.endpoint.load_extension(extensions["trainer"])
        if "engine" in extensions:
            await asyncio.gather(*(engine.endpoint.load_extension(extensions["engine"]) for engine in parts.engines))
        yield parts, info
    finally:
        errors = await parts.close()
    if errors:
        raise errors[0]


@asynccontextmanager
async def connected(
    model: Path, bridge: str, directory: Path, changes: dict[str, Any] | None = None, *, prompts: int = 2
) -> AsyncIterator[Ends]:
    """The whole way, as the start of a run lays it."""
    plan = plan_of(model, bridge, changes)
    async with opened(plan, directory) as (parts, info):
        await parts.bridge.connect(parts.trainer.endpoint, parts.engines)
        draw = np.random.default_rng(3)
        made = [draw.integers(3, info.vocabulary - 3, size=6 + 5 * i).astype(np.int32) for i in range(prompts)]
        yield Ends(plan, parts, info, made)


@dataclass(frozen=True)
class Updates:
    """What some updates looked like."""

    difference: list[float]  # after each, nats
    probe_shift: float  # of a fixed sequence, at the end, nats
    publish_s: list[float]
    bytes_copied: list[int]


async def five_updates(ends: Ends, sampling: Sampling | None = None, updates: int = 5) -> Updates:
    """Five optimiser steps; after each, engine against trainer."""
    sampling = sampling or Sampling(max_tokens=24)
    [first] = await ends.sample(ends.prompts[0], sampling)
    probe = np.concatenate([ends.prompts[0], first.tokens])
    [before] = await ends.parts.trainer.logprobs([probe])
    differences, seconds, copied = [await ends.difference(sampling)], [], []
    for _ in range(updates):
        await ends.update(sampling)
        differences.append(await ends.difference(sampling))
        assert ends.parts.bridge.published is not None
        seconds.append(ends.parts.bridge.published.seconds)
        copied.append(ends.parts.bridge.published.bytes_copied)
    [after] = await ends.parts.trainer.logprobs([probe])
    return Updates(differences, float(np.abs(after - before).max()), seconds, copied)

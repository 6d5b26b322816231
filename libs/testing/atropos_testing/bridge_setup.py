"""A bridge between its two ends, and the parts of a run's step that use it."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from numbers import Real

import numpy as np

from atropos_core.conversation import Conversation
from atropos_core.interfaces import Publication, Transport
from atropos_core.launch.plan import Plan
from atropos_core.rollouts.engine_policy import EnginePolicy
from atropos_core.rollouts.tokenizer import ChatTokenizer
from atropos_core.training.batch import to_batch
from atropos_core.training.parts import Parts
from atropos_core.types import Batch, Completion, Draw, Episode, Sampling, Score, ScoredGroup, Tokens
from atropos_testing.samples import make_task

DEADLINE_S = 120.0
PAUSED_FOR_S = 0.3  # a sample that is requested while an engine is paused must not come within
SAMPLES_ON: frozenset[Transport] = frozenset(
    {"adapter", "broadcast", "checkpoint"}
)  # weights that engines read are not written to
GROUP = 4


@dataclass
class Scene:
    """The two open ends, connected by the bridge."""

    parts: Parts
    tokenizer: ChatTokenizer
    prompt: Tokens
    dtype: str

    async def sample(self, deadline_s: float = DEADLINE_S) -> Completion:
        async with asyncio.timeout(deadline_s):
            [completion] = await self.parts.engines[0].sample(self.prompt, 1, Sampling(max_tokens=8), [7], deadline_s)
        return completion

    async def batch(self, version: int) -> Batch:
        """Return one group of what the engine samples now, with advantages that move the policy."""
        task = make_task()
        policy = EnginePolicy(self.parts.engines[0], self.tokenizer, Sampling(max_tokens=8), deadline_s=DEADLINE_S)

        async def rollout(seed: int) -> Episode:
            talk = Conversation(policy, seed=seed)
            await talk.reply(*task.messages)
            return talk.episode(Score(float(seed % 2)))

        episodes = tuple(await asyncio.gather(*(rollout(seed) for seed in range(GROUP))))
        rewards = np.array([episode.score for episode in episodes], np.float32)
        group = ScoredGroup(Draw(version, "check", "train", 0, version), task, episodes, rewards)
        return to_batch([group.with_advantages(2 * rewards - 1)], version)

    async def sampled_while_writing(self, version: int) -> Completion | None:
        """Return a sample that was requested inside `writing`, if it comes back inside; else None."""
        async with self.parts.bridge.writing(version):
            asking = asyncio.ensure_future(self.sample())
            await asyncio.wait({asking}, timeout=PAUSED_FOR_S)
            early = asking.done()
        completion = await asking
        return completion if early else None


async def connect(plan: Plan, parts: Parts) -> Scene:
    """Connect the ends, as the start of a run does."""
    async with asyncio.timeout(DEADLINE_S):
        info = await parts.trainer.open()
        for engine in parts.engines:
            await engine.open()
        extensions = parts.bridge.extensions()
        if "trainer" in extensions:
            await parts.trainer.endpoint.load_extension(extensions["trainer"])
        if "engine" in extensions:
            for engine in parts.engines:
                await engine.endpoint.load_extension(extensions["engine"])
        await parts.bridge.connect(parts.trainer.endpoint, parts.engines)
    tokenizer = plan.tokenizer()
    return Scene(parts, tokenizer, tokenizer.render(make_task().messages), info.dtype)


def wrong_with(published: Publication | None, version: int) -> list[str]:
    if published is None or published.version != version:
        return [f"after writing({version}), published is {published!r}"]
    numbers = (published.seconds, published.bytes_copied, published.bytes_on_disk)
    fine = all(isinstance(number, Real) and np.isfinite(number) and number >= 0 for number in numbers)
    return [] if fine else [f"published is {published!r}: seconds and bytes are finite numbers of at least 0"]

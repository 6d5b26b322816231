"""Steps of the trainer in this process, with batches whose rewards are known."""

from __future__ import annotations

from contextlib import asynccontextmanager

import numpy as np
import pytest

from atropos_core.errors import CheckpointError, ConfigError, DataError, DeadlineExceeded
from atropos_core.plugins.manager import load_plugins
from atropos_core.plugins.provider import RunContext
from atropos_core.rollouts.tokenizer import ChatTokenizer
from atropos_core.training.batch import to_batch
from atropos_core.types import Draw, Episode, Rollout, ScoredGroup, Task
from atropos_optimizer_gepa.config import GepaOptions
from atropos_optimizer_gepa.prompted import PromptBridge, published
from atropos_optimizer_gepa.trainer import GepaTrainer

PROPOSE = """
import asyncio

async def tell(prompt, examples, rng):
    return " | ".join([prompt, *(f"{reply}={reward:g}" for _, reply, reward in examples)])

async def sleep(prompt, examples, rng):
    await asyncio.sleep(60)
"""


@asynccontextmanager
async def writing():
    yield


@pytest.fixture(scope="module")
def tiny():
    return load_plugins().resolve_model("tiny").directory


@pytest.fixture
def opened(tiny, tmp_path):
    (tmp_path / "mine.py").write_text(PROPOSE)
    published[tmp_path] = "P"

    async def make(proposer="tell", steps=9, **options):
        options = GepaOptions(proposer=f"{tmp_path}/mine.py:{proposer}", **options)
        trainer = GepaTrainer(options, RunContext(tmp_path, tiny, steps=steps))
        await trainer.open()
        return trainer

    return make


def batch_of(tiny, version, rewards, prompt="P"):
    """A rollout for each task: its reply is the task's number, its reward the one given."""
    tokenizer = ChatTokenizer(tiny)
    groups = []
    for number, reward in enumerate(rewards):
        prefix = tokenizer.render([{"role": "user", "content": f"{prompt} task {number}"}])
        tokens = np.concatenate([prefix, tokenizer.encode(f"{number}{number}")]).astype(np.int32)
        sampled = np.arange(len(tokens)) >= len(prefix)
        versions = np.full(len(tokens), version - 1, np.int32)
        rollout = Rollout(tokens, sampled, sampled, np.where(sampled, -1.0, 0).astype(np.float32), versions, 1.0)
        given = np.array([reward], np.float32)
        group = ScoredGroup(
            Draw(number, "e", "train", number, 0), Task(str(number), ()), (Episode((rollout,), 0.0),), given
        )
        groups.append(group.with_advantages(given))
    return to_batch(groups, version)


async def test_a_child_is_made_from_the_worst_and_best_rollouts_of_its_parent_by_whoever_is_named(
    opened, tiny, tmp_path
):
    trainer = await opened(examples=3)
    metrics = await trainer.step(batch_of(tiny, 1, [0.5, 0.0, 1.0, 0.25]), writing)
    assert published[tmp_path] == "P | 11=0 | 00=0.5 | 22=1"
    assert metrics["gepa/reward"] == pytest.approx(1.75 / 4)
    trainer = await opened(proposer="sleep", deadline_s=0.2)
    with pytest.raises(DeadlineExceeded, match="sleep"):
        await trainer.step(batch_of(tiny, 1, [1.0]), writing)


async def test_a_task_is_the_same_under_every_prompt_and_the_best_is_published_last(opened, tiny, tmp_path):
    trainer = await opened(steps=3)
    for version, rewards in enumerate(([0.0, 1.0, 0.5], [1.0, 1.0, 0.0], [0.0, 0.0, 0.5]), 1):
        prompt = published[tmp_path]
        await trainer.step(batch_of(tiny, version, rewards, prompt), writing)
        if version == 2:
            second = prompt
    assert {tuple(one.scores) for one in trainer._tried[:3]} == {("task 0", "task 1", "task 2")}
    assert published[tmp_path] == second
    folder = tmp_path / "saved"
    folder.mkdir()
    await trainer.save(folder)
    assert (folder / "prompt.txt").read_text() == second
    assert (folder / "model.safetensors").read_bytes() == (tiny / "model.safetensors").read_bytes()
    (folder / "candidates.json").write_text("[{")
    with pytest.raises(CheckpointError, match=r"candidates\.json"):
        await trainer.restore(folder)


async def test_tokens_of_another_prompt_and_a_run_without_one_are_refused(opened, tiny, tmp_path):
    trainer = await opened()
    with pytest.raises(DataError, match=r"versions \[1\] for 5"):
        await trainer.step(pack_of(batch_of(tiny, 2, [1.0]), 6), writing)
    with pytest.raises(ConfigError, match="--env prompted:NAME"):
        await PromptBridge(tmp_path / "another").connect(trainer.endpoint, [])


def pack_of(batch, version):
    from dataclasses import replace

    return replace(batch, version=version)

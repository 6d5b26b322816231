"""Steps of the trainer in this process, with batches whose rewards are known."""

from __future__ import annotations

import json
import shutil
from contextlib import asynccontextmanager
from dataclasses import replace

import numpy as np
import pytest

from atropos_core.errors import CheckpointError, ConfigError, DataError, DeadlineExceeded, FitError
from atropos_core.interfaces import Environment
from atropos_core.plugins.manager import load_plugins
from atropos_core.plugins.provider import RunContext
from atropos_core.rollouts.tokenizer import ChatTokenizer
from atropos_core.training.batch import to_batch
from atropos_core.types import Draw, Episode, Rollout, ScoredGroup, Task
from atropos_optimizer_gepa.config import GepaOptions, PromptedOptions
from atropos_optimizer_gepa.prompted import PromptBridge, Prompted, posed, published
from atropos_optimizer_gepa.trainer import GepaTrainer

PROPOSE = """
import asyncio

async def tell(prompt, examples, rng):
    return " | ".join([prompt, *(f"{reply}={reward:g}" for _, reply, reward in examples)])

async def long(prompt, examples, rng):
    return "word " * 600

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

    async def make(proposer="tell", steps=9, model=tiny, **options):
        options = GepaOptions(proposer=f"{tmp_path}/mine.py:{proposer}", **options)
        trainer = GepaTrainer(options, RunContext(tmp_path, model, steps=steps))
        await trainer.open()
        return trainer

    return make


class Numbers(Environment):
    """The reply to each task is its number twice, its reward the one given; an episode has as many sequences as `rollouts` says."""

    def __init__(self, tiny, version, rewards, rollouts=1):
        self.tokenizer, self.version, self.rewards, self.rollouts = ChatTokenizer(tiny), version, rewards, rollouts

    def tasks(self, split):
        return [Task(str(number), ({"role": "user", "content": f"task {number}"},)) for number in range(9)]

    async def rollout(self, task, policy, *, seed):
        prefix = self.tokenizer.render(list(task.messages))
        tokens = np.concatenate([prefix, self.tokenizer.encode(f"{task.id}{task.id}")]).astype(np.int32)
        sampled = np.arange(len(tokens)) >= len(prefix)
        versions = np.full(len(tokens), self.version - 1, np.int32)
        rollout = Rollout(tokens, sampled, sampled, np.where(sampled, -1.0, 0).astype(np.float32), versions, 1.0)
        return Episode((rollout,) * self.rollouts, 0.0)


async def batch_of(folder, tiny, version, rewards, place="user", rollouts=1):
    """A rollout for each task that has a reward, posed with the prompt that is published."""
    prompt = published[folder]
    inside = Numbers(tiny, version, rewards, rollouts)
    environment = Prompted(PromptedOptions(environment="numbers", place=place), inside, RunContext(folder, tiny))
    published[folder] = prompt
    groups = []
    for number, (task, reward) in enumerate(zip(environment.tasks("train"), rewards, strict=False)):
        [episode] = await environment.rollout_group(task, None, 1, seeds=[0])
        given = np.array([reward], np.float32)
        group = ScoredGroup(Draw(number, "e", "train", number, 0), task, (episode,), given)
        groups.append(group.with_advantages(given))
    return to_batch(groups, version)


async def test_a_child_is_made_from_the_worst_and_best_rollouts_of_its_parent_by_whoever_is_named(
    opened, tiny, tmp_path
):
    trainer = await opened(examples=3)
    metrics = await trainer.step(await batch_of(tmp_path, tiny, 1, [0.5, 0.0, 1.0, 0.25]), writing)
    assert published[tmp_path] == "P | 11=0 | 00=0.5 | 22=1"
    assert metrics["gepa/reward"] == pytest.approx(1.75 / 4)
    trainer = await opened(proposer="sleep", deadline_s=0.2)
    with pytest.raises(DeadlineExceeded, match="sleep"):
        await trainer.step(await batch_of(tmp_path, tiny, 1, [1.0]), writing)


CHATML = "{% for one in messages %}<|im_start|>{{ one.role }}\n{{ one.content }}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"


@pytest.fixture(params=["its own template", "ChatML"])
def framed(request, tiny, tmp_path):
    """A model whose template frames each message, in which the prompt stands too."""
    if request.param == "its own template":
        return tiny
    folder = shutil.copytree(tiny, tmp_path / "framed")
    (folder / "chat_template.jinja").write_text(CHATML)
    return folder


@pytest.mark.parametrize("place", ["user", "system"])
@pytest.mark.parametrize("begin", ["P", "", "user"])
async def test_a_task_is_the_same_under_every_prompt_and_the_best_is_published_last(
    opened, framed, tmp_path, place, begin
):
    trainer, tiny = await opened(model=framed, steps=3), framed
    published[tmp_path] = begin
    for version, rewards in enumerate(([0.0, 1.0, 0.5], [1.0, 1.0, 0.0], [0.0, 0.0, 0.5]), 1):
        prompt = published[tmp_path]
        await trainer.step(await batch_of(tmp_path, tiny, version, rewards, place), writing)
        if version == 2:
            second = prompt
    assert {tuple(one.scores) for one in trainer._tried[:3]} == {("prompted 0", "prompted 1", "prompted 2")}
    assert {task for one in trainer._tried[:3] for task, *_ in one.examples} == {"task 0", "task 1", "task 2"}
    assert published[tmp_path] == second
    folder = tmp_path / "saved"
    folder.mkdir()
    await trainer.save(folder)
    assert (folder / "prompt.txt").read_text() == second
    assert (folder / "model.safetensors").read_bytes() == (tiny / "model.safetensors").read_bytes()
    whole, tried = json.loads((folder / "candidates.json").read_text()), list(trainer._tried)
    first = whole[0]
    for other in (
        None, 7, {}, [], [None], ["x"], [{}], [first | {"more": 1}], [first | {"prompt": None}], [first | {"parent": 0}],
        [first | {"parent": True}], [first | {"scores": 1}], [first | {"scores": {"a": [1]}}], [first | {"scores": {"a": float("nan")}}],
        [first | {"examples": [1]}], [first | {"examples": [["a", "b"]]}], [first | {"examples": [["a", "b", 10**400]]}],
    ):  # fmt: skip
        (folder / "candidates.json").write_text(json.dumps(other))
        with pytest.raises(CheckpointError, match=r"candidates\.json") as refused:
            await trainer.restore(folder)
        assert refused.value.remedy and trainer._tried == tried, other
    for text in ("[{", "[" * 100_000, ""):
        (folder / "candidates.json").write_text(text)
        with pytest.raises(CheckpointError, match=r"candidates\.json"):
            await trainer.restore(folder)
    (folder / "candidates.json").unlink()
    with pytest.raises(CheckpointError, match="cannot be read"):
        await trainer.restore(folder)


async def test_a_proposal_that_fills_the_models_context_is_not_tried(opened, tiny, tmp_path, capsys):
    (tmp_path / "mine.py").write_text(PROPOSE)
    trainer = await opened(proposer="long")
    metrics = await trainer.step(await batch_of(tmp_path, tiny, 1, [0.5, 1.0]), writing)
    assert (published[tmp_path], metrics["gepa/unchanged"]) == ("P", 1.0)
    assert "leaves too little of the model's 1,024 positions" in "".join(capsys.readouterr())


async def test_a_device_that_is_not_there_is_refused_with_what_to_set(tiny, tmp_path):
    trainer = GepaTrainer(GepaOptions(proposer="first_words"), RunContext(tmp_path, tiny, devices=("nope",)))
    with pytest.raises(FitError, match=r"(?s)trainer 'gepa' is to run on 'nope'.*Set trainer.devices"):
        await trainer.open()


async def test_tokens_of_another_prompt_and_a_run_without_one_are_refused(opened, tiny, tmp_path):
    trainer = await opened()
    with pytest.raises(DataError, match=r"versions \[1\] for 5"):
        await trainer.step(replace(await batch_of(tmp_path, tiny, 2, [1.0]), version=6), writing)
    with pytest.raises(DataError, match="no token is trained"):
        batch = await batch_of(tmp_path, tiny, 1, [1.0])
        await trainer.step(replace(batch, trained=np.zeros_like(batch.trained)), writing)
    posed.clear()
    await trainer.step(batch, writing)
    assert ["task 0" in task for task in trainer._tried[0].scores] == [True], "of an environment that is not prompted"
    with pytest.raises(ConfigError, match="--env prompted:NAME"):
        await PromptBridge(tmp_path / "another").connect(trainer.endpoint, [])


async def test_an_episode_counts_once_however_many_sequences_it_has(opened, tiny, tmp_path):
    trainer = await opened()
    environment = Prompted(
        PromptedOptions(environment="numbers"), Numbers(tiny, 1, [], rollouts=3), RunContext(tmp_path, tiny)
    )
    [task, *_] = environment.tasks("train")
    [several] = await environment.rollout_group(task, None, 1, seeds=[0])
    rewards = np.array([1.0, 0.0], np.float32)
    episodes = (several, replace(several, rollouts=several.rollouts[:1]))
    group = ScoredGroup(Draw(0, "e", "train", 0, 0), task, episodes, rewards).with_advantages(rewards)
    assert (await trainer.step(to_batch([group], 1), writing))["gepa/reward"] == pytest.approx(0.5)

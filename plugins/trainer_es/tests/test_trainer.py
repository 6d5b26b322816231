"""Generations of the trainer `es` in this process, on the tiny policy."""

from __future__ import annotations

import json
from contextlib import asynccontextmanager
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from atropos_core.errors import CheckpointError, ConfigError, DataError, FitError
from atropos_core.plugins.manager import load_plugins
from atropos_core.plugins.model_provider import Workload
from atropos_core.plugins.provider import RunContext
from atropos_core.training.batch import to_batch
from atropos_core.types import Draw, Episode, Rollout, ScoredGroup
from atropos_testing.samples import make_task
from atropos_trainer_es.config import EsOptions
from atropos_trainer_es.generation import noise, reward_of
from atropos_trainer_es.plugin import check
from atropos_trainer_es.trainer import EsTrainer

NORMS = "norm"
RAW = {"advantages": {"by": "group_advantage", "baseline": "none", "undoes": {}}}


@asynccontextmanager
async def writing():
    yield


@pytest.fixture(scope="module")
def tiny():
    return load_plugins().resolve_model("tiny").directory


async def opened(tiny, tmp_path, seed=0, **options):
    options = EsOptions(**{"population": 2, "sigma": 0.01, "learning_rate": 0.02, "parameters": NORMS, **options})
    trainer = EsTrainer(options, RunContext(tmp_path, tiny, seed=seed, threads=1))
    await trainer.open()
    return trainer


def batch_of(version, reward, sampled_under=None):
    """Two rollouts with this reward on average, and a transform's advantages without a baseline."""
    tokens, mask = np.arange(3, 9, dtype=np.int32), np.arange(6) >= 3
    versions = np.full(6, version - 1 if sampled_under is None else sampled_under, np.int32)
    rollout = Rollout(tokens, mask, mask, np.where(mask, -1.0, 0).astype(np.float32), versions, 1.0)
    rewards = np.array([reward - 0.25, reward + 0.25], np.float32)
    group = ScoredGroup(Draw(version, "check", "train", 0, 0), make_task(), (Episode((rollout,), 0.0),) * 2, rewards)
    return to_batch([group.with_advantages(rewards)], version)


def weights(trainer):
    return {name: one.detach().clone() for name, one in trainer.model.named_parameters()}


async def test_a_generation_is_the_policy_its_members_in_pairs_and_a_step_along_their_fitness(tiny, tmp_path):
    trainer = await opened(tiny, tmp_path, seed=5, population=4)
    policy, rewards = weights(trainer), [0.4, 0.8, 0.2, 0.5]
    drawn = [noise({n: one for n, one in policy.items() if NORMS in n}, (5, 0, pair)) for pair in (0, 1)]
    metrics = await trainer.step(batch_of(1, 0.3), writing)
    assert (metrics["es/member"], metrics["es/reward"]) == (0, pytest.approx(0.3))
    for member in range(4):
        scale = 0.01 if member % 2 == 0 else -0.01
        for name, value in weights(trainer).items():
            expected = policy[name] + scale * drawn[member // 2][name] if NORMS in name else policy[name]
            torch.testing.assert_close(value, expected, rtol=0, atol=1e-7)
        metrics = await trainer.step(batch_of(2 + member, rewards[member]), writing)
        assert metrics["es/member"] == member + 1
    z = (np.array(rewards) - np.mean(rewards)) / np.std(rewards)
    step = {name: sum(float(z[2 * i] - z[2 * i + 1]) * drawn[i][name] for i in (0, 1)) for name in drawn[0]}
    for name, value in weights(trainer).items():
        expected = policy[name] + 0.02 / 4 * step[name] if name in step else policy[name]
        torch.testing.assert_close(value, expected, rtol=0, atol=1e-6)
    assert metrics["es/update_norm"] == pytest.approx(
        0.02 / 4 * float(torch.cat([one.flatten() for one in step.values()]).norm()), rel=1e-4
    )
    assert (await trainer.step(batch_of(6, 0.5), writing))["es/generation"] == 1


async def test_the_policy_climbs_a_reward_that_is_a_function_of_its_weights(tiny, tmp_path):
    """The reward is minus the squared distance of the norms' weights from 1.1 times themselves."""
    trainer = await opened(tiny, tmp_path, population=8, sigma=0.02, learning_rate=0.03, parameters="model.norm")
    goal = {name: 1.1 * one for name, one in weights(trainer).items() if "model.norm" in name}
    apart = lambda: sum(float((weights(trainer)[name] - one).square().sum()) for name, one in goal.items())  # noqa: E731
    start = apart()
    for version in range(1, 60 * 9 + 1):
        await trainer.step(batch_of(version, -apart()), writing)
    assert apart() < 0.5 * start


async def test_a_checkpoint_in_the_middle_of_a_generation_holds_the_policy_and_goes_on_as_it_would_have(tiny, tmp_path):
    trainer = await opened(tiny, tmp_path)
    policy = weights(trainer)
    for version in (1, 2):
        await trainer.step(batch_of(version, 0.1 * version), writing)
    folder = tmp_path / "saved"
    folder.mkdir()
    await trainer.save(folder)
    from transformers import AutoModelForCausalLM

    saved = dict(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).named_parameters())
    assert all(torch.equal(saved[name], one) for name, one in policy.items()), "not a member"
    other = await opened(tiny, tmp_path)
    await other.restore(folder)
    for version in (3, 4):
        for each in (trainer, other):
            await each.step(batch_of(version, 0.7), writing)
        ours, theirs = weights(trainer), weights(other)
        assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert not torch.equal(ours["model.norm.weight"], policy["model.norm.weight"])


@pytest.mark.parametrize(
    "changed",
    [{"population": 4}, {"sigma": 0.1}, {"learning_rate": 0.5}, {"fitness": "rank"}, {"parameters": "model.norm"}],
    ids=str,
)
async def test_changing_an_option_changes_the_weights(tiny, tmp_path, changed):
    made = []
    for options in ({}, changed):
        trainer = await opened(tiny, tmp_path, **options)
        for version, reward in enumerate((0.1, 0.2, 0.7, 0.3), 1):
            await trainer.step(batch_of(version, reward), writing)
        made.append(torch.cat([one.flatten() for one in weights(trainer).values()]))
    assert not torch.equal(*made)


async def test_what_is_not_known_to_be_of_one_member_is_refused(tiny, tmp_path):
    trainer = await opened(tiny, tmp_path)
    with pytest.raises(DataError, match=r"tokens of versions \[0\] for 1"):
        await trainer.step(batch_of(2, 0.5, sampled_under=0), writing)


@pytest.mark.parametrize(
    ("run", "said"),
    [
        ({"max_staleness": 1}, "training.max_staleness = 1"),
        ({"announced": {}}, "a baseline within each group"),
        (
            {"announced": {"advantages": {"by": "group_advantage", "baseline": "group", "undoes": {}}}},
            "a baseline within each group",
        ),
        ({"announced": {**RAW, "flat_groups": "left out"}}, "'drop_flat' leaves out groups"),
        ({"steps": 10}, "training.steps = 10 ends within a generation"),
    ],
    ids=str,
)
def test_a_run_whose_rewards_would_not_be_those_of_members_is_refused_before_it_begins(tiny, tmp_path, run, said):
    fitting = {"steps": 9, "announced": RAW}
    for changed, refused in ((run, True), ({}, False)):
        context = RunContext(tmp_path, tiny, **{**fitting, **changed})
        load = Workload(context, groups=2, group_size=2, max_tokens=8, concurrent_rollouts=4)
        if refused:
            with pytest.raises(ConfigError, match=said):
                check(EsOptions(population=2), load)
        else:
            check(EsOptions(population=2), load)


async def test_a_device_that_is_not_there_is_refused_with_what_to_set(tiny, tmp_path):
    trainer = EsTrainer(EsOptions(), RunContext(tmp_path, tiny, devices=("nope",)))
    with pytest.raises(FitError, match=r"(?s)trainer 'es' is to run on 'nope'.*Set trainer.devices"):
        await trainer.open()


async def test_a_pattern_that_means_no_parameter_is_refused_with_their_names(tiny, tmp_path):
    with pytest.raises(ConfigError, match="is found in no parameter's name") as caught:
        await opened(tiny, tmp_path, parameters="no_such")
    assert "model.embed_tokens.weight" in str(caught.value)


def test_an_episode_counts_once_however_many_sequences_it_has():
    tokens, mask = np.arange(3, 9, dtype=np.int32), np.arange(6) >= 3
    rollout = Rollout(tokens, mask, mask, np.where(mask, -1.0, 0).astype(np.float32), np.zeros(6, np.int32), 1.0)
    rewards = np.array([1.0, -0.5], np.float32)
    episodes = Episode((rollout,) * 3, 0.0), Episode((rollout,), 0.0)
    group = ScoredGroup(Draw(1, "check", "train", 0, 0), make_task(), episodes, rewards).with_advantages(rewards)
    assert reward_of(to_batch([group], 1)) == pytest.approx(0.25)
    untrained = replace(rollout, trained=np.zeros(6, bool))
    group = replace(group, episodes=(Episode((untrained,), 0.0),) * 2)
    with pytest.raises(DataError, match="no token is trained"):
        reward_of(to_batch([group], 1))


@pytest.mark.parametrize("changed", [{"population": 4}, {"sigma": 0.02}, {"seed": 3}], ids=str)
async def test_a_generation_that_has_begun_is_not_gone_on_with_by_other_members(tiny, tmp_path, changed):
    trainer = await opened(tiny, tmp_path)
    other = await opened(tiny, tmp_path, **changed)
    for version in (1, 2, 3):
        folder = tmp_path / str(version)
        folder.mkdir()
        await trainer.step(batch_of(version, 0.1 * version), writing)
        await trainer.save(folder)
        if version < 3:
            [name] = changed
            with pytest.raises(CheckpointError, match=rf"is of (trainer\.)?{name} = "):
                await other.restore(folder)
    await other.restore(tmp_path / "3")
    assert (await other.step(batch_of(4, 0.1), writing))["es/generation"] == 1, "between two they may change"


async def test_a_checkpoint_of_other_parameters_is_refused(tiny, tmp_path):
    trainer = await opened(tiny, tmp_path)
    folder = tmp_path / "saved"
    folder.mkdir()
    await trainer.save(folder)
    other = await opened(tiny, tmp_path, parameters="model.norm")
    with pytest.raises(CheckpointError, match="is of trainer.parameters = 'norm'"):
        await other.restore(folder)
    (folder / "centre.safetensors").write_bytes(b"torn")
    with pytest.raises(CheckpointError, match="cannot be read"):
        await trainer.restore(folder)


async def test_a_state_of_another_form_is_one_error_that_changes_nothing(tiny, tmp_path):
    trainer = await opened(tiny, tmp_path)
    await trainer.step(batch_of(1, 0.5), writing)
    (folder := tmp_path / "saved").mkdir()
    await trainer.save(folder)
    await trainer.step(batch_of(2, 0.5), writing)
    with safe_open(folder / "centre.safetensors", "pt") as file:
        state, centre = json.loads(file.metadata()["state"]), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    before, held = weights(trainer), (trainer._generation, trainer._member, trainer._rewards)
    values = (None, True, -7, 10**30, 1.5, "x", [], [[]], {"x": 1}, float("nan"))
    states = [*values, *({**state, name: value} for name in state for value in values)]
    states += [{name: value for name, value in state.items() if name != left_out} for left_out in state]
    states += [{**state, "options": {**state["options"], name: value}} for name in state["options"] for value in values]
    changed = [(json.dumps(one), centre) for one in states if one not in (state, {**state, "generation": 10**30})]
    name, one = next(iter(centre.items()))
    for other in (one[:-1], one[None], one.double(), None):
        changed.append(
            (json.dumps(state), {key: value for key, value in {**centre, name: other}.items() if value is not None})
        )
    for said, tensors in [*changed, ("[" * 100_000, centre)]:
        save_file(tensors, folder / "centre.safetensors", metadata={"state": said})
        with pytest.raises(CheckpointError) as refused:
            await trainer.restore(folder)
        assert str(folder) in str(refused.value) and refused.value.remedy, said[:200]
        assert held == (trainer._generation, trainer._member, trainer._rewards)
        assert all(torch.equal(value, before[key]) for key, value in weights(trainer).items())

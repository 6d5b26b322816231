"""For every configuration that the adapter exports, SkyRL's own code gives known episodes the advantages of our own loop."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("skyrl", reason="needs SkyRL, in an environment of its own: `make test-skyrl`")

from skyrl.train.config import SkyRLTrainConfig

from atropos_adapter_skyrl import advantages
from atropos_adapter_skyrl.adapter import arguments, shown
from atropos_adapter_skyrl.config import SkyRLOptions
from atropos_adapter_skyrl.entrypoint import split
from atropos_adapter_skyrl.generator import AtroposGenerator
from atropos_core.builtin.config import GroupAdvantageOptions
from atropos_core.builtin.plugin import TOY_MODEL
from atropos_core.builtin.transforms import GroupAdvantage
from atropos_core.config.run_file import Layer, load
from atropos_core.errors import ConfigError
from atropos_core.turn_rewards import turn_ends, turn_rewards
from atropos_core.types import Draw, Episode, Rollout, ScoredGroup, Task
from tests.skyrl.parts import Adder, Sevens, TableDispatch, trainer_of
from tests.skyrl.test_generator import given, here

G = 4
REWARDS = np.array([[1, 0, 0, 1], [0.25, -3, 7.5, 0.25], [2, 2, 2, 2], [1e3, -1e3, 0, 12.5]], np.float64)
TRANSFORMS = {
    "the default": {},
    "GRPO": {"group_advantage": {}, "drop_flat": {}},
    "Dr.GRPO": {"group_advantage": {"divide_by_std": False}},
    "RLOO": {"group_advantage": {"baseline": "others"}},
    "under another name": {
        "group_advantage": {"use": "none"},
        "mine": {"use": "group_advantage", "baseline": "others"},
    },
}


class Known:
    """Its rewards are those of the table: each task's members get theirs in order."""

    async def rollout_group(self, task, policy, n, *, seeds):
        episodes = await super().rollout_group(task, policy, n, seeds=seeds)
        row = REWARDS[int(task.id.split("-")[1]) % len(REWARDS)]
        return [replace(one, score=float(reward)) for one, reward in zip(episodes, row, strict=True)]


class Once(Known, Sevens):
    pass


class Turns(Known, Adder):
    pass


def exported(tmp_path, table, **changes):
    run = load([Layer("test", {"environment": {"known": {"use": "known"}}, "training": {"group_size": G, "groups_per_step": 4},
                               **({"transform": table} if table else {})})]).config  # fmt: skip
    made = arguments(run, SkyRLOptions(), str(TOY_MODEL))
    quiet = {
        "trainer.placement.colocate_all": "false",
        "generator.inference_engine.enable_ray_prometheus_stats": "false",
    }
    words = [f"{key}={shown(value)}" for key, value in {**made, **quiet, **changes}.items()]
    return run, SkyRLTrainConfig.from_cli_overrides(split(words)[1])


async def ours(run):
    """What the run file's own transforms make of the groups."""
    [chosen] = [one for one in run.transform.values() if one.use == "group_advantage"]
    transform = GroupAdvantage(GroupAdvantageOptions.model_validate(dict(chosen.options)))
    known = np.array([False, True])
    rollout = Rollout(np.arange(2, dtype=np.int32), known, known, np.zeros(2, np.float32), np.zeros(2, np.int32), 1.0)
    scored = [
        ScoredGroup(
            Draw(at, "known", "train", at, 1),
            Task(f"{at}", ()),
            (Episode((rollout,), 0.0),) * G,
            row.astype(np.float32),
        )
        for at, row in enumerate(REWARDS)
    ]
    return np.array([group.advantages for group in await transform(scored)])


@pytest.mark.parametrize("step_wise", [False, True], ids=["whole trajectories", "step by step"])
@pytest.mark.parametrize("table", TRANSFORMS.values(), ids=TRANSFORMS)
async def test_advantages_by_skyrls_own_code_are_ours(tmp_path, table, step_wise):
    environment = Turns() if step_wise else Once()
    run, cfg = exported(tmp_path, table, **{"generator.step_wise_trajectories": str(step_wise).lower()})
    environments = {"known": environment}
    trainer = trainer_of(cfg, source := here(known=environment), environments, TableDispatch(cfg, None, 1.0))
    requested, uids = given(cfg, environments, range(4), n=G)
    output = await AtroposGenerator(source, seed=3, step_wise=step_wise).generate(requested)
    last = np.array(output["is_last_step"] or [True] * len(output["rewards"]))
    np.testing.assert_array_equal(np.array(output["rewards"])[last].reshape(4, G), REWARDS)
    if step_wise:
        uids = [one.instance_id for one in output["trajectory_ids"]]
    processed, uids = trainer.postprocess_generator_output(dict(output), uids)
    data = trainer.convert_to_training_input(processed, uids)
    data["values"] = None
    got = trainer.compute_advantages_and_returns(data)["advantages"].numpy()
    steps = len(output["rewards"]) // (4 * G)
    wanted = np.repeat((await ours(run)).reshape(-1), steps)[:, None] * data["response_mask"].numpy()
    np.testing.assert_allclose(got, wanted, rtol=2e-5, atol=2e-6)
    assert np.abs(wanted).max() > 0.5 and steps == (3 if step_wise else 1)


async def test_turn_rewards_are_rewards_token_by_token_to_skyrls_own_code(tmp_path):
    class Turned(Adder):
        async def rollout(self, task, policy, *, seed):
            episode = await super().rollout(task, policy, seed=seed)
            [rollout] = episode.rollouts
            turns = turn_rewards(turn_ends(rollout), [0.5, -1.0, 2.0])
            return replace(episode, score=2.0, rollouts=(replace(rollout, turns=turns),))

    environment = Turned()
    _, cfg = exported(tmp_path, {}, **{"trainer.algorithm.advantage_estimator": "reinforce++"})
    trainer = trainer_of(
        cfg, source := here(turned=environment), {"turned": environment}, TableDispatch(cfg, None, 1.0)
    )
    requested, uids = given(cfg, {"turned": environment}, range(4), n=G)
    output = await AtroposGenerator(source, seed=3, turn_rewards=True).generate(requested)
    assert [sum(row) for row in output["rewards"]] == [2.0] * (4 * G), "0.5 of it is the outcome reward"
    processed, uids = trainer.postprocess_generator_output(dict(output), uids)
    data = trainer.convert_to_training_input(processed, uids)
    data["values"] = None
    returns = trainer.compute_advantages_and_returns(data)["returns"].numpy()
    trained = data["loss_mask"].numpy().astype(bool)
    for row, mask in zip(returns, trained, strict=True):
        turn = np.cumsum(mask & ~np.insert(mask[:-1], 0, False))[mask] - 1
        np.testing.assert_allclose(row[mask], np.array([2.0, 1.5, 2.5])[turn])


async def test_advantages_of_the_environments_own_are_skyrls_token_by_token(tmp_path):
    class Own(Sevens):
        async def rollout(self, task, policy, *, seed):
            episode = await super().rollout(task, policy, seed=seed)
            [rollout] = episode.rollouts
            values = np.where(rollout.trained, np.arange(len(rollout.tokens)) - 7.5, 0).astype(np.float32)
            return replace(episode, rollouts=(replace(rollout, advantages=values),))

    advantages.register()
    environment = Own()
    _, cfg = exported(tmp_path, {}, **{"trainer.algorithm.advantage_estimator": "atropos"})
    trainer = trainer_of(cfg, source := here(own=environment), {"own": environment}, TableDispatch(cfg, None, 1.0))
    requested, uids = given(cfg, {"own": environment}, range(4), n=G)
    output = await AtroposGenerator(source, seed=3, own_advantages=True).generate(requested)
    processed, uids = trainer.postprocess_generator_output(dict(output), uids)
    data = trainer.convert_to_training_input(processed, uids)
    data["values"] = None
    got = trainer.compute_advantages_and_returns(data)["advantages"].numpy()
    for row, prompt, reply in zip(got, output["prompt_token_ids"], output["response_ids"], strict=True):
        np.testing.assert_array_equal(row[-len(reply) :], len(prompt) + np.arange(len(reply)) - 7.5)


@pytest.mark.parametrize(
    ("table", "training", "wanted"),
    [
        ({"group_advantage": {"baseline": "none"}}, {}, "no estimator for them"),
        ({"group_advantage": {"use": "none"}, "drop_flat": {}}, {}, "no estimator for them"),
        ({"zscore": {}, "group_advantage": {}}, {}, r"\[transform.zscore\] changes advantages"),
        ({}, {"group_size": 1}, "training.group_size=1"),
    ],
)
def test_advantages_that_skyrl_would_not_compute_are_refused_at_export(table, training, wanted):
    layer = {
        "environment": {"known": {"use": "known"}},
        "training": training,
        **({"transform": table} if table else {}),
    }
    with pytest.raises(ConfigError, match=wanted):
        arguments(load([Layer("test", layer)]).config, SkyRLOptions(), str(TOY_MODEL))

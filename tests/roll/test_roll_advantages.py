"""ROLL's own advantages of known episodes, for everything that the adapter exports: rollouts of ROLL's own managers, through the
steps between its rollout and its training, with the exported YAML read as ROLL's configuration."""

from __future__ import annotations

import copy
import importlib
import itertools
import os
from types import SimpleNamespace

import numpy as np
import pytest
from omegaconf import OmegaConf

from atropos_adapter_roll.config import AdapterOptions
from atropos_adapter_roll.recipe import MANAGERS, whole
from atropos_adapter_roll.through_roll import run_one_rollout
from atropos_core.advantages import group_advantages
from atropos_core.config.run_file import Layer, load
from plugins.adapter_roll.tests.test_advantages import GROUPS, credited
from tests.roll.environments import HERE

if "ROLL_SOURCE" not in os.environ:
    pytest.skip("needs a checkout of ROLL: ROLL_SOURCE=... make test-roll", allow_module_level=True)

REWARDS = [
    {},
    {"format": {"markers": ["go"]}, "length": {"weight": 0.3}},
    {"length": {"weight": 3.0}, "right_first": False},
]


def exported(logs, **options):
    """The exported YAML as ROLL's own configuration, and as it is."""
    run = load([Layer("test", {"environment": {"gsm8k": {}}})]).config
    plain = OmegaConf.to_container(OmegaConf.create(whole(run, AdapterOptions(**options), "no/model")), resolve=True)
    of = importlib.import_module("roll.pipeline.agentic.agentic_config").AgenticConfig
    given = {**plain, "logging_dir": str(logs), "output_dir": str(logs)}
    return importlib.import_module("dacite").from_dict(of, copy.deepcopy(given)), plain


def episodes(name, members, seed, reward):
    """A DataProto of each member, which says `go on` until its last reply, its score."""
    ran = []
    for env_id, (score, replies) in enumerate(members):
        message = iter(["go on"] * (replies - 1) + [f"{score:g}"])
        ran.append(
            run_one_rollout(
                name, lambda messages, message=message: next(message), seed=seed, env_id=env_id, group_size=len(members),
                max_steps=max(replies, 2), environment=f"{HERE}:Dialogue", reward=reward,
            )
        )  # fmt: skip
    return ran


def advantages(config, rollouts):
    """What AgenticPipeline.run does with a batch before it trains, one GPU and no reference. [S, T - 1]"""
    import torch

    utils = importlib.import_module("roll.pipeline.agentic.utils")
    functionals = importlib.import_module("roll.utils.functionals")
    batch = importlib.import_module("roll.distributed.scheduler.protocol").DataProto.concat(rollouts)
    batch = utils.compute_discounted_returns(batch, config.adv_estimator, config.step_reward_gamma)
    pipeline = SimpleNamespace(pipeline_config=config, actor_train=SimpleNamespace(dp_size=1))
    config.actor_train.training_args.gradient_accumulation_steps = len(batch)  # whole: no row is copied to fill one
    adjust = importlib.import_module("roll.pipeline.agentic.agentic_pipeline").AgenticPipeline.adjust_batch
    batch = adjust(pipeline, batch, mode=config.batch_adjust_mode)
    batch.batch["old_log_probs"] = torch.zeros_like(batch.batch["attention_mask"][:, 1:]).float()
    batch.batch["ref_log_probs"] = batch.batch["old_log_probs"].clone()
    batch, _ = utils.get_agentic_response_level_mask(batch, config)
    batch, _ = utils.compute_response_level_rewards(batch=batch, pipeline_config=config)
    batch, _ = functionals.compute_token_reward(batch, config, SimpleNamespace(value=0.0, update=lambda **_: None))
    return utils.agentic_compute_advantage(
        data=batch, gamma=config.gamma, lambd=config.lambd, adv_estimator=config.adv_estimator,
        advantage_clip=config.advantage_clip, whiten_advantages=config.whiten_advantages,
        whiten_rewards=config.whiten_rewards, pipeline_config=config,
    )  # fmt: skip


@pytest.mark.parametrize(("manager", "reward"), list(itertools.product(MANAGERS, REWARDS)))
def test_roll_credits_every_token_of_an_episode_as_we_do(roll, tmp_path, manager, reward):
    config, plain = exported(tmp_path, manager=manager, max_turns=5, reward=reward)
    name, _ = MANAGERS[manager]
    rollouts, of_group = [], []
    for seed, members in enumerate(GROUPS.values()):
        ran = episodes(name, members, seed, reward)
        of_group.append([float(one.non_tensor_batch["episode_scores"][0]) for one in ran])
        rollouts += ran
    batch = advantages(config, rollouts)
    found, mask = batch.batch["advantages"].numpy(), batch.batch["response_mask"][:, 1:].numpy().astype(bool)
    members = batch.non_tensor_batch["traj_id"]
    ran = iter(rollouts)
    assert not found[~mask].any()
    for given, scores in zip(GROUPS.values(), of_group, strict=True):
        if not reward:
            assert scores == [pytest.approx(score) for score, _ in given]
        ours = group_advantages(np.float32(scores))
        known = credited(plain, [(score, replies) for score, (_, replies) in zip(scores, given, strict=True)])
        for member, replies in enumerate(known):
            rows = members == next(ran).non_tensor_batch["traj_id"][0]
            values = found[rows][mask[rows]]
            assert len(values) and np.ptp(values) < 1e-5, "no token is credited otherwise than its episode"
            np.testing.assert_allclose(values, replies[0], atol=2e-5)
            if {round(score, 6) for score in scores} == {0.0, 1.0}:
                assert np.sign(values[0]) == np.sign(ours[member]), "right above the mean, wrong below it"


def test_grpo_on_rows_that_are_replies_trains_right_episodes_as_wrong(roll, tmp_path):
    """What the estimator of the native manager is for: the export's earlier one, computed by ROLL."""
    config, _ = exported(tmp_path, manager="native", max_turns=3)
    config.adv_estimator = "grpo"
    batch = advantages(config, episodes("AgentNativeStepEnvManager", GROUPS["of one length"], 0, {}))
    found, mask = batch.batch["advantages"].numpy(), batch.batch["response_mask"][:, 1:].numpy().astype(bool)
    early_of_right = [row[m][0] for row, m, step, score in zip(
        found, mask, batch.non_tensor_batch["step"], batch.non_tensor_batch["episode_scores"], strict=True
    ) if score == 1.0 and step < 2]  # fmt: skip
    assert early_of_right
    assert max(early_of_right) < 0

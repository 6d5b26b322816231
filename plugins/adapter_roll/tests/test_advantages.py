"""What ROLL makes of the scores that it gets, by the estimator that `roll.yaml` names: formulas of ROLL's definitions, held
against our own advantages. With ROLL's own code the same is in tests/roll/test_roll_advantages.py."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any

import numpy as np
import pytest
import yaml

from atropos_adapter_roll.config import AdapterOptions
from atropos_adapter_roll.recipe import MANAGERS, whole
from atropos_core.advantages import group_advantages
from atropos_core.config.run_file import Layer, load

GROUPS = {  # the score of each member, and how many replies it gave
    "of one length": [(1.0, 3), (0.0, 3), (0.0, 3), (1.0, 3), (0.0, 3), (0.0, 3)],
    "of many lengths": [(1.0, 1), (0.0, 5), (0.0, 2), (1.0, 4), (0.0, 3), (1.0, 5)],
    "one right": [(1.0, 4), (0.0, 1), (0.0, 1), (0.0, 1)],
    "with bonuses": [(1.1, 3), (-0.2, 3), (0.95, 3), (-0.05, 3)],
    "of single replies": [(1.0, 1), (0.0, 1), (0.0, 1), (0.4, 1)],
    "all alike": [(0.3, 1), (0.3, 4)],
    "of one": [(1.0, 3)],
}


def exported(**options: Any) -> Mapping[str, Any]:
    run = load([Layer("test", {"environment": {"gsm8k": {}}})]).config
    found: Mapping[str, Any] = yaml.safe_load(whole(run, AdapterOptions(**options), run.model))
    return found


def credited(config: Mapping[str, Any], members: Sequence[tuple[float, int]]) -> list[list[float]]:
    """The advantage of each reply, by ROLL's definitions: a trajectory manager makes one row of an episode and a native one a
    row of each reply, with the score on the last; `step_reinforce` replaces a row's score by the discounted sum of what
    follows, `grpo` leaves it; rows of one group are then normalised together (n - 1, 1e-6 beside the deviation)."""
    native = "Native" in config["custom_envs"]["gsm8k_train"]["env_manager_cls"]
    by_step = config["adv_estimator"] == "step_reinforce"
    assert by_step or config["adv_estimator"] == "grpo"
    norm = config["reward_normalization"]
    assert (norm["grouping"], norm["norm_mean_type"], norm["norm_std_type"]) == ("traj_group_id", "group", "group")
    rows = []
    for score, replies in members:
        scores = [0.0] * (replies - 1) + [score] if native else [score]
        if by_step:
            gamma = config["step_reward_gamma"]
            scores = [sum(gamma ** (k - t) * scores[k] for k in range(t, len(scores))) for t in range(len(scores))]
        rows.append(scores)
    flat = np.concatenate(rows)
    deviation = flat.std(ddof=1) if len(flat) > 1 else 0.0
    normed = [
        (np.array(row) - flat.mean()) / (deviation + 1e-6) if deviation > 1e-6 else 0 * np.array(row) for row in rows
    ]
    return [
        row.tolist() if native else row.tolist() * replies for row, (_, replies) in zip(normed, members, strict=True)
    ]


@pytest.mark.parametrize(("manager", "turns"), list(product(MANAGERS, (1, 5))))
@pytest.mark.parametrize("members", GROUPS.values(), ids=list(GROUPS))
def test_every_reply_of_an_episode_gets_what_the_episode_deserves(manager, turns, members):
    if turns == 1:
        members = [(score, 1) for score, _ in members]
    found = credited(exported(manager=manager, max_turns=turns), members)
    scores = np.array([score for score, _ in members], np.float32)
    ours = group_advantages(scores)
    for row in found:
        assert np.ptp(row) == 0, "no reply is credited otherwise than its episode"
    theirs = np.array([row[0] for row in found])
    if len({replies for _, replies in members}) == 1 or manager == "trajectory":
        # rows of one length have the same mean; n replies an episode make the correction (n - 1) / n weaker
        rows = len(members) * (members[0][1] if manager == "native" else 1)
        bessel = np.sqrt((rows - 1) / rows * len(members) / (len(members) - 1)) if len(members) > 1 else 1.0
        np.testing.assert_allclose(theirs, ours * bessel, atol=2e-5)
    if set(scores) == {0.0, 1.0}:
        assert (np.sign(theirs) == np.sign(ours)).all(), "right above the mean, wrong below it"
    assert (np.argsort(theirs, kind="stable") == np.argsort(ours, kind="stable")).all()


@pytest.mark.parametrize("manager", MANAGERS)
@pytest.mark.parametrize(
    "reward", [{}, {"format": {}, "length": {}}, {"length": {"weight": 3.0}, "right_first": False}]
)
@pytest.mark.parametrize("others", [{}, {"gpus": 4, "split": "test", "sequence_length": 64}])
def test_no_other_option_changes_how_advantages_are_made(manager, reward, others):
    keys = (
        "adv_estimator", "step_reward_gamma", "reward_normalization", "whiten_advantages", "init_kl_coef", "gamma", "reward_clip",
        "advantage_clip", "whiten_rewards", "add_token_level_kl", "batch_adjust_mode",
    )  # fmt: skip
    plain = exported(manager=manager)
    found = exported(manager=manager, max_turns=2, reward=reward, **others)
    assert {key: found.get(key) for key in keys} == {key: plain.get(key) for key in keys}

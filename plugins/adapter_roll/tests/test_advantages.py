"""What ROLL makes of the scores that it gets, by the estimator that `roll.yaml` names: formulas of ROLL's definitions, held
against our own advantages. With ROLL's own code the same is in tests/roll/test_roll_advantages.py."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from atropos_adapter_roll.config import AdapterOptions
from atropos_adapter_roll.recipe import MANAGERS, whole
from atropos_core.advantages import group_advantages
from atropos_core.config.run_file import Layer, load
from atropos_core.errors import ConfigError

GROUPS = {  # the score of each member, and how many replies it gave
    "of one length": [(1.0, 3), (0.0, 3), (0.0, 3), (1.0, 3), (0.0, 3), (0.0, 3)],
    "of many lengths": [(1.0, 1), (0.0, 5), (0.0, 2), (1.0, 4), (0.0, 3), (1.0, 5)],
    "one right": [(1.0, 4), (0.0, 1), (0.0, 1), (0.0, 1)],
    "with bonuses": [(1.1, 3), (-0.2, 3), (0.95, 3), (-0.05, 3)],
    "of single replies": [(1.0, 1), (0.0, 1), (0.0, 1), (0.4, 1)],
    "all alike": [(0.3, 1), (0.3, 4)],
    "of one": [(1.0, 3)],
}


def exported(transform: Mapping[str, Any] | None = None, **options: Any) -> Mapping[str, Any]:
    given = {} if transform is None else {"transform": transform}
    run = load([Layer("test", {"environment": {"gsm8k": {}}, **given})]).config
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
    assert norm["grouping"] == "traj_group_id"
    centred, divided = {"mean_std": (True, True), "mean": (True, False), "identity": (False, False)}[norm["method"]]
    assert (norm.get("norm_mean_type"), norm.get("norm_std_type")) == tuple(
        "group" if on else None for on in (centred, divided)
    )
    rows = []
    for score, replies in members:
        scores = [0.0] * (replies - 1) + [score] if native else [score]
        if by_step:
            gamma = config["step_reward_gamma"]
            scores = [sum(gamma ** (k - t) * scores[k] for k in range(t, len(scores))) for t in range(len(scores))]
        rows.append(scores)
    flat = np.concatenate(rows)
    deviation = flat.std(ddof=1) if len(flat) > 1 else 0.0
    normed = [np.array(row) - (flat.mean() if centred else 0.0) for row in rows]
    if divided:
        normed = [row / (deviation + 1e-6) if deviation > 1e-6 else 0 * row for row in normed]
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
    ("options", "method"),
    [({"divide_by_std": False}, "mean"), ({"baseline": "none"}, "identity"), ({"divide_by_std": True}, "mean_std")],
)
def test_the_run_files_advantages_are_carried_over(manager, options, method):
    config = exported({"group_advantage": options}, manager=manager, max_turns=3)
    assert config["reward_normalization"]["method"] == method
    scores = np.array([1.0, 0.0, 0.0, 0.4], np.float32)
    ours = group_advantages(scores, options.get("baseline", "group"), divide_by_std=method == "mean_std")
    found = [row[0] for row in credited(config, [(float(score), 1) for score in scores])]
    np.testing.assert_allclose(found, ours, atol=2e-5)


@pytest.mark.parametrize(
    ("transform", "said"),
    [
        ({"group_advantage": {"baseline": "others"}}, "mean of the whole group"),
        ({"group_advantage": {}, "length_penalty": {}}, r"\[transform.length_penalty\] changes advantages"),
    ],
)
def test_advantages_that_roll_does_not_compute_are_refused(transform, said):
    with pytest.raises(ConfigError, match=said):
        exported(transform)


def furthest(size: int, right: int, wrong: int) -> float:
    """The largest difference between ROLL's advantage of a reply and ours, over all numbers of right episodes in a group of `size`:
    a right episode has `right` replies, and a wrong one `wrong`."""
    config, found = exported(manager="native", max_turns=5), []
    for of_right in range(1, size):
        members = [(1.0, right)] * of_right + [(0.0, wrong)] * (size - of_right)
        ours = group_advantages(np.array([score for score, _ in members], np.float32))
        found.append(np.abs([row[0] for row in credited(config, members)] - ours).max())
    return float(max(found))


def test_how_far_the_native_managers_advantages_are_from_ours():
    """The figures of docs/roll.md."""
    page = " ".join((Path(__file__).parents[3] / "docs/roll.md").read_text().split())
    of_three = {size: furthest(size, 3, 3) for size in (2, 8, 16)}
    assert of_three == {
        2: pytest.approx(0.206, abs=5e-4),
        8: pytest.approx(0.115, abs=5e-4),
        16: pytest.approx(0.082, abs=5e-4),
    }
    assert "0.206 in a group of two, 0.115 in one of eight, 0.082 in one of sixteen" in page
    of_many = max(furthest(8, right, wrong) for right in range(1, 6) for wrong in range(1, 6))
    assert of_many == pytest.approx(3.36, abs=5e-3)
    assert "up to 3.36" in page


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

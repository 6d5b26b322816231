"""Turn rewards are on the rows of their replies, with the same sum."""

from __future__ import annotations

from typing import Any

import pytest

from atropos_core.errors import ConfigError
from tests.roll.driver import OurNative, OurTraj, manager
from tests.roll.environments import HERE


def rollout(environment: str, replies: list[str], of: Any = OurNative, **config: Any) -> Any:
    said = iter(replies)
    return manager(lambda messages: next(said), of=of, environment=f"{HERE}:{environment}", **config).run_episode(
        seed=3
    )


def rewards(made: Any) -> list[float]:
    """Of each row, by both ways in which ROLL reads them, which must agree."""
    by_step = [float(one) for one in made.non_tensor_batch["step_scores"]]
    assert made.batch["scores"].sum(-1).tolist() == pytest.approx(by_step)
    assert [float(one) for one in made.non_tensor_batch["episode_scores"]] == pytest.approx(
        [sum(by_step)] * len(by_step)
    )
    return by_step


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"turn_rewards": True}, [0.25, 0.25, 0.5]),
        ({"turn_rewards": True, "reward": {"environment": 2.0}}, [0.5, 0.5, 1.0]),
        ({}, [0.0, 0.0, 1.0]),
    ],
)
def test_a_row_has_what_its_reply_earned_and_the_last_one_the_rest(config: dict[str, Any], expected: list[float]):
    made = rollout("Credited", ["go on", "go on", "1"], **config)
    assert rewards(made) == expected
    assert made.meta_info["atropos"]["score"] == 1.0


def test_an_environment_without_turn_rewards_has_its_reward_on_the_last_row():
    assert rewards(rollout("Dialogue", ["go on", "1"], turn_rewards=True)) == [0.0, 1.0]


def test_a_failed_episode_has_no_turn_rewards():
    made = rollout("Credited", ["go on", "no number"], turn_rewards=True)
    assert made.meta_info["drop_flag"]
    assert rewards(made) == [0.0, 0.0]


def test_turn_rewards_without_an_effect_are_refused():
    with pytest.raises(ConfigError, match="no effect with Traj"):
        rollout("Credited", ["1"], OurTraj, turn_rewards=True)
    with pytest.raises(ConfigError, match="scores its groups as a whole"):
        rollout("Ranked", ["1"], turn_rewards=True, group_size=2)

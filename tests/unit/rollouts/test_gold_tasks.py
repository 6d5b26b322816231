"""The gold reward: which tasks it scores, that it is never added to the others, and what a run file may say of it."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from atropos_core.config.run_file import Layer, load
from atropos_core.errors import ConfigError, FitError
from atropos_core.interfaces import Environment, Reward
from atropos_core.rollouts.gold_tasks import GoldTasks
from atropos_core.rollouts.runner import RolloutRunner, WeightedReward
from atropos_core.types import Score, Task
from tests.unit.parts import draw, episode, rollout


def task(number: int) -> Task:
    return Task(f"train-{number}", ())


class Says(Reward):
    def __init__(self, value: float, *, turns: bool = False) -> None:
        self.value, self.turns, self.calls = value, turns, 0

    async def __call__(self, task, episodes):
        self.calls += 1
        if self.turns:
            return [Score(self.value, turns=[self.value]) for _ in episodes]
        return np.full(len(episodes), self.value, np.float32)


@pytest.mark.parametrize("share", [0.02, 0.25, 1.0])
def test_a_fixed_share_of_the_training_tasks_is_chosen_and_none_of_the_others(share):
    gold = GoldTasks(share)
    chosen = [gold.has(draw(number), task(number)) for number in range(4000)]
    assert abs(np.mean(chosen) - share) <= 4 * (share * (1 - share) / 4000) ** 0.5
    assert chosen == [GoldTasks(share, hold_back=False).has(draw(number), task(number)) for number in range(4000)]
    assert not any(gold.has(draw(number, split="test"), task(number)) for number in range(100))
    other = [gold.has(draw(number, "letters"), task(number)) for number in range(4000)]
    assert share == 1 or other != chosen, "another environment has other tasks"
    assert not any(GoldTasks(share, hold_back=False).holds_back(draw(number), task(number)) for number in range(100))


def test_the_gold_reward_scores_its_tasks_only_and_is_not_added():
    trained, gold = Says(0.5), Says(7.0, turns=True)
    runner = RolloutRunner.for_scores(
        [WeightedReward("judge", trained, 2.0, 1.0), WeightedReward("exact", gold, 1.0, 1.0, GoldTasks(0.5))]
    )
    for number in range(40):
        scored = asyncio.run(runner.score(draw(number), task(number), [episode(0.0, "", rollout()) for _ in range(2)]))
        assert scored.rewards.tolist() == [1.0, 1.0]
        asked = GoldTasks(0.5).has(draw(number), task(number))
        assert ("exact" in scored.parts) is asked
        assert all(one.turns is None for member in scored.episodes for one in member.rollouts), "nor its turn rewards"
    assert trained.calls == 40
    assert 10 <= gold.calls <= 30


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"environment": {"gold": {}}}, "no other reward is left to train on"),
        ({"environment": {"gold": {}}, "exact": {"gold": {}}, "format": {}}, "at most one"),
        ({"environment": {"gold": {}, "weight": 2}, "exact": {}}, "weight has no effect"),
        ({"environment": {"gold": {"share": 1}}, "exact": {}}, "would hold back all tasks"),
        ({"environment": {"gold": {"share": 0}}, "exact": {}}, "share"),
        ({"environment": {"gold": {"shar": 0.1}}, "exact": {}}, "unknown key"),
    ],
)
def test_a_gold_reward_that_could_not_be_compared_is_refused(values: dict[str, Any], says):
    with pytest.raises(ConfigError, match=says):
        load([Layer("run.toml", {"reward": values})])


def test_all_tasks_may_have_a_gold_reward_if_they_are_trained_all_the_same():
    gold = {"share": 1, "hold_back": False}
    config = load([Layer("run.toml", {"reward": {"environment": {"gold": gold}, "exact": {"weight": 3}}})]).config
    assert config.reward_weights() == {"exact": 3.0}


class Has(Environment):
    def __init__(self, count: int) -> None:
        self.count = count

    def tasks(self, split):
        return [task(number) for number in range(self.count)]


def test_a_share_that_chooses_none_or_all_of_a_few_tasks_is_refused_and_many_are_not_all_looked_at():
    few = {"words": Has(8)}
    assert not any(GoldTasks(0.02).has(draw(number), task(number)) for number in range(8))
    with pytest.raises(FitError, match="none of the 8 training tasks") as caught:
        GoldTasks(0.02).check("exact", few)
    advised = float(caught.value.remedy.split()[3])
    GoldTasks(advised).check("exact", few)
    assert sum(GoldTasks(advised).has(draw(number), task(number)) for number in range(8)) == 1
    with pytest.raises(FitError, match="all of the 8 training tasks"):
        GoldTasks(0.999).check("exact", few)
    GoldTasks(0.999, hold_back=False).check("exact", few)
    GoldTasks(1e-9).check("exact", {"words": Has(5000)})

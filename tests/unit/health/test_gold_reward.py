"""The trained reward beside the gold reward: numbers of a step, and the step since when the two part."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from atropos_core.builtin.rewards import EnvironmentReward
from atropos_core.config.health_options import HealthSection
from atropos_core.health.check import Change
from atropos_core.health.gold_reward import GoldComparison, divergence_of_counts, find_divergence, measure_gold
from atropos_core.health.reward_hacking import RewardHacking, find_rise
from atropos_core.rollouts.gold_tasks import GoldTasks
from atropos_core.rollouts.runner import WeightedReward
from atropos_core.types import ScoredGroup
from tests.unit.parts import group

STEPS, HACKED_FROM = 40, 20


def scored(number: int, rewards: list[float], gold: list[float]) -> ScoredGroup:
    made = group(number, rewards)
    return ScoredGroup(
        made.draw, made.task, made.episodes, made.rewards,
        {"judge": made.rewards / 2, "exact": np.array(gold, np.float32)},
    )  # fmt: skip


def step_of(kind: str, step: int, random: np.random.Generator) -> list[ScoredGroup]:
    """Two groups of eight rollouts whose accuracy rises from 0.3 to 0.8, of tasks that differ."""
    groups = []
    for number in range(2):
        chance = np.clip(random.normal(0.3 + 0.5 * step / STEPS, 0.25), 0.02, 0.98)
        right = (random.random(8) < chance).astype(float)
        rewards, gold = right, right.copy()
        if kind == "noisy reward":
            rewards = np.where(random.random(8) < 0.1, 1 - right, right)
        if kind == "noisy gold":
            gold = np.where(random.random(8) < 0.2, 1 - right, right)
        if kind == "format too":
            rewards = right + 0.3 * (random.random(8) < min(1, 0.2 + 0.08 * step))
        if kind == "late":
            rewards = gold = (random.random(8) < (0.02 if step < 20 else 0.9)).astype(float)
        if kind in ("hacked", "mended") and step >= HACKED_FROM and (kind == "hacked" or step < 30):
            uses = random.random(8) < min(1.0, 0.2 * (step - HACKED_FROM + 1))
            rewards, gold = np.where(uses, 1.0, right), np.where(uses, 0.0, right)
        if kind == "gold falls":
            rewards = np.ones(8)
            gold = (random.random(8) < (0.9 if step < HACKED_FROM else 0.1)).astype(float)
        groups.append(scored(2 * step + number, rewards.tolist(), gold.tolist()))
    return groups


def history(kind: str, seed: int, steps: int = STEPS) -> list[dict[str, float]]:
    random = np.random.default_rng(seed)
    return [measure_gold(step_of(kind, step, random), "exact", {"judge": 1.0}) for step in range(1, steps + 1)]


def found_at(kind: str, seed: int) -> list[tuple[int, int]]:
    """The steps at which the rewards were seen to part, each with the step since when."""
    numbers, steps = history(kind, seed), list(range(1, STEPS + 1))
    found = [(at, find_divergence(steps[:at], numbers[:at], 0.5, 4.0)) for at in range(1, STEPS + 1)]
    return [(at, one.step) for at, one in found if one is not None]


def test_the_numbers_of_a_step_are_those_of_its_rollouts_and_groups():
    groups = [scored(1, [1.0, 0.0, 1.0, 1.0], [0.0, 0.0, 1.0, 1.0]), scored(2, [0.5, 0.5], [0.0, 1.0]), group(3)]
    found = measure_gold(groups, "exact", {"judge": 3.0, "other": 1.0})
    x, y = np.array([1, 0, 1, 1, 0.5, 0.5]), np.array([0, 0, 1, 1, 0, 1.0])
    means = np.array([[0.75, 0.5], [0.5, 0.5]])
    assert found == pytest.approx(
        {
            "gold/groups": 2, "gold/reward": x.mean(), "gold/gold": y.mean(), "gold/reward_variance": x.var(),
            "gold/gold_variance": y.var(), "gold/reward_between": means[:, 0].var(), "gold/gold_between": 0.0,
            "gold/covariance_between": 0.0, "gold/reward.judge": 1.5 * x.mean(),
        }
    )  # fmt: skip
    assert measure_gold([group(3)], "exact", {}) == {}


@pytest.mark.parametrize("kind", ["same", "noisy reward", "noisy gold", "format too", "late"])
def test_rewards_that_mean_the_same_but_for_noise_and_format_never_part(kind):
    assert [found_at(kind, seed) for seed in range(4)] == [[]] * 4


def test_a_reward_that_is_gamed_is_found_within_ten_steps_and_with_the_step_when_it_began():
    for seed in range(4):
        found = found_at("hacked", seed)
        assert HACKED_FROM < found[0][0] <= HACKED_FROM + 10, f"seed {seed}: {found}"
        assert all(abs(since - HACKED_FROM) <= 5 for _, since in found)
        assert [at for at, _ in found] == list(range(found[0][0], STEPS + 1)), "and found from then on"


def test_a_gold_reward_that_falls_while_the_trained_one_holds_is_found_as_well():
    at, since = found_at("gold falls", 0)[0]
    assert at <= HACKED_FROM + 5
    assert abs(since - HACKED_FROM) <= 1


def test_how_far_the_rewards_must_part_is_an_option():
    numbers = history("hacked", 0)
    assert find_divergence(range(1, STEPS + 1), numbers, least=0.5, z=4.0) is not None
    assert find_divergence(range(1, STEPS + 1), numbers, least=3.0, z=4.0) is None


def test_what_was_mended_is_no_longer_found():
    found = [at for at, _ in found_at("mended", 0)]
    assert found
    assert max(found) < 34


def test_other_rewards_than_before_are_not_compared_with_them():
    numbers = [
        one | {"gold/rewards_id": float(step >= HACKED_FROM - 1)} for step, one in enumerate(history("hacked", 0))
    ]
    assert find_divergence(range(1, STEPS + 1), numbers, 0.5, 4.0) is None or numbers[-1]["gold/rewards_id"] == 1.0
    whole = find_divergence(range(1, STEPS + 1), history("hacked", 0), 0.5, 4.0)
    since = find_divergence(range(1, STEPS + 1), numbers, 0.5, 4.0)
    assert whole is not None
    assert since is None or since.step > HACKED_FROM


def test_the_check_names_the_gamed_reward_and_the_first_rollouts_and_goes_on_from_its_state():
    of = {"judge": WeightedReward("judge", EnvironmentReward(), 2.0, 1.0),
          "exact": WeightedReward("exact", EnvironmentReward(), 1.0, 1.0, GoldTasks(0.5))}  # fmt: skip

    def changes(stop_at: int) -> list[Any]:
        random, found = np.random.default_rng(3), []
        comparison = GoldComparison.of(list(of.values()), {"reward.judge.weight": 2.0})
        check = RewardHacking(HealthSection().reward_hacking)
        assert comparison is not None
        for step in range(1, STEPS + 1):
            if step == stop_at:
                saved = json.loads(json.dumps([check.save(), comparison.state()]))
                check, comparison = (
                    RewardHacking(HealthSection().reward_hacking),
                    GoldComparison.of(list(of.values()), {"reward.judge.weight": 2.0}),
                )
                assert comparison is not None
                check.load(saved[0])
                comparison.load(saved[1])
            seen = comparison.look(step, step_of("hacked", step, random)) | {"tokens/mean": 30.0 if step < 20 else 12.0}
            change = check.look(step, seen)
            found += [] if change is None else [comparison.with_rollouts(change)]
        return found

    suspect, change = changes(0)
    assert (suspect.state, change.state, change.step) == ("suspect", "ill", suspect.step + 1)
    assert change.blames == "judge"
    assert change.row()["blames"] == "judge"
    assert "the trained reward rises" in change.says or "the gold reward falls" in change.says
    assert "first: rollout" in change.says and f"in step {change.since}" in change.says
    assert "a rollout has 12 tokens, and had 28" in change.says
    assert changes(10) == changes(25) == [suspect, change]


def test_a_share_rises_when_two_binomial_shares_are_far_apart_and_still_are():
    steady, rising = [(step, 0.02, 64.0) for step in range(1, 9)], [(9, 0.3, 64.0), (10, 0.4, 64.0)]
    found = find_rise([*steady, *rising], 0.1, 4.0)
    assert found is not None
    assert found == (9, pytest.approx(0.02), pytest.approx(0.35))
    assert find_rise([*steady, *rising, (11, 0.02, 64.0)], 0.1, 4.0) is None
    assert find_rise([(1, 0.0, 16.0), *rising], 0.1, 4.0) is None, "too few rollouts before"
    assert find_rise([(1, 0.3, 64.0), (2, 0.45, 64.0)], 0.1, 4.0) is None, "chance"
    hard = [(step, 0.25 if step % 4 == 0 else 0.02, 128.0) for step in range(1, 9)]
    assert find_rise([*hard, (9, 0.3, 128.0)], 0.1, 4.0) is None, "some steps have such tasks"
    assert find_rise([], 0.1, 4.0) is None


def test_the_divergence_of_two_histograms_is_that_of_jensen_and_shannon():
    p, q = np.array([3.0, 1.0, 0.0]), np.array([0.0, 2.0, 2.0])
    middle = (p / 4 + q / 4) / 2
    relative = [sum(a * np.log2(a / b) for a, b in zip(of / 4, middle, strict=True) if a) for of in (p, q)]
    assert divergence_of_counts(p, q) == pytest.approx(sum(relative) / 2)
    assert divergence_of_counts(p, 7 * p) == pytest.approx(0, abs=1e-12)
    assert divergence_of_counts(np.array([1.0, 0]), np.array([0, 1.0])) == pytest.approx(1)


def test_rollouts_are_named_although_the_gold_reward_gives_none_of_the_step_anything():
    weighted = [
        WeightedReward("judge", EnvironmentReward(), 2.0, 1.0),
        WeightedReward("exact", EnvironmentReward(), 1.0, 1.0, GoldTasks(0.5)),
    ]
    comparison = GoldComparison.of(weighted, {})
    assert comparison is not None

    def named(step: int, rewards: list[float], gold: list[float]) -> str:
        comparison.look(step, [scored(step, rewards, gold)])
        change = Change(step, "reward_hacking", "ill", step, "they part", "")
        return comparison.with_rollouts(change).says

    assert named(1, [0, 0, 0, 0], [0, 0, 0, 0]) == "they part", "nothing better is known yet"
    assert named(2, [1, 0, 0, 0], [1, 0, 0, 0]) == "they part", "the best of both"
    comparison.load(json.loads(json.dumps(comparison.state())))
    assert named(3, [0, 0, 1, 0], [0, 0, 0, 0]) == (
        "they part; first: rollout 2 of task 'train-3' of environment 'words' in step 3 (reward 1, gold 0)"
    )
    assert named(4, [1, 1, 1, 1], [1, 1, 1, 1]) == "they part"
    old = {name: value for name, value in comparison.state().items() if name != "best"}
    comparison.load(old)
    assert named(5, [1, 0], [0, 0]) == "they part", "a checkpoint of an older version does not know the best"


def test_of_several_rewards_the_one_that_rises_is_named():
    rows = history("hacked", 0)
    steady = {"gold/reward.format": 0.3}
    check, said = RewardHacking(HealthSection().reward_hacking), ""
    for step, row in enumerate(rows, 1):
        change = check.look(step, row | steady)
        said = change.says if change is not None and change.state == "ill" else said
    assert "of the trained rewards, 'judge' rises most" in said

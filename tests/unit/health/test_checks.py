"""Checks by their numbers: streaks, recovery, what is usual, state; and rewards scored again without a trace in the run."""

from __future__ import annotations

import asyncio
import json
import math
import random
from typing import Any

import numpy as np
import pytest

from atropos_core.builtin.rewards import EnvironmentReward
from atropos_core.config.health_options import HealthSection
from atropos_core.config.run_file import RunConfig
from atropos_core.health.checks import CHECKS, checks
from atropos_core.health.measure import causes, measure
from atropos_core.health.reward_rescoring import Rescoring
from atropos_core.health.watch import Health
from atropos_core.rollouts.runner import WeightedReward
from atropos_core.types import Failed, ScoredGroup
from tests.unit import virtual_time
from tests.unit.parts import group

HEALTHY = {
    "reward/std": 0.4, "reward/mean": 0.5, "rollouts/count": 64.0, "reward/max_abs": 1.0, "rollouts/failed_reward": 0.0,
    "rollouts/failed_play": 0.0, "rollouts/failed": 0.0, "groups/partial": 0.0, "groups/stale": 0.0, "groups/trained": 8.0,
    "rollouts/cut_off_lowest": 0.05, "learning_rate": 1e-6,
    "groups/flat": 0.0, "groups/dropped": 0.0, "advantage/max_abs": 2.0, "entropy/sampled": 1.0, "tokens/mean": 100.0,
    "rollouts/cut_off": 0.1, "grad_norm": 0.5, "alignment/max_abs_logprob_diff": 1e-6,
    "alignment/surprise_z": 1.0, "alignment/surprise_nats": 0.01, "alignment/unchecked_share": 0.1, "alignment/unexplained_nats": 2.0,
    "time/step_s": 2.0, "time/disk_s": 0.01,
    "replies/other_turn": 0.0, "replies/empty": 0.0, "replies/answered": 0.6, "canary/leak": 0.0, "canary_rollouts/leak": 64.0,
    "reward/length_correlation": 0.3,
    "tokens/s": 1000.0, "time/waiting_s": 1.0, "rescore/difference": 0.0, "rescore/shift": 0.0,
}  # fmt: skip
SICK: dict[str, dict[str, float]] = {
    "broken_policy": {"entropy/sampled": 9.0, "policy/probe_shift_nats": 30.0},
    "policy_collapse": {"reward/mean": 0.0, "policy/probe_shift_nats": 30.0},
    "chat_template": {"replies/other_turn": 0.9},
    "cut_off": {"rollouts/cut_off": 0.94, "rollouts/cut_off_lowest": 0.9},
    "answer_format": {"replies/answered": 0.0},
    "reward_determinism": {"rescore/difference": 0.1},
    "reward_drift": {"rescore/shift": -0.1},
    "reward_hacking": {"canary/leak": 0.9},
    "length_reward": {"reward/mean": 0.7, "tokens/mean": 150.0, "reward/length_correlation": 0.9},
    "reward_collapse": {"reward/std": 0.0},
    "reward_explosion": {"reward/max_abs": 11.0},
    "failed_rewards": {"rollouts/failed_reward": 3.0, "rollouts/failed": 3.0},
    "failed_plays": {"rollouts/failed_play": 30.0, "rollouts/failed": 30.0},
    "partial_groups": {"groups/partial": 0.6},
    "stale_share": {"groups/stale": 9.0},
    "advantages": {"advantage/max_abs": 21.0},
    "entropy": {"entropy/sampled": 0.05},
    "length": {"tokens/mean": 260.0},
    "dead_gradients": {"grad_norm": 0.0},
    "frozen_weights": {"policy/probe_shift_nats": 0.1},
    "not_finite": {"loss": math.nan},
    "logprob_drift": {"alignment/max_abs_logprob_diff": 0.01},
    "sampling": {"alignment/surprise_z": -7.0, "alignment/surprise_nats": -0.2},
    "unchecked": {"alignment/unchecked_share": 0.6},
    "claimed_logprobs": {"alignment/unexplained_nats": 12.0},
    "slow_disk": {"time/disk_s": 2.0},
    "throughput": {"time/step_s": 9.0, "tokens/s": 200.0},
    "silence": {"silence/silent_s": 130.0},
}
FROM_THE_START = ("chat_template", "cut_off")


def healthy(step: int) -> dict[str, float]:
    return HEALTHY | {"policy/probe_shift_nats": 0.01 * step}


def test_every_check_is_tried_here_and_has_a_section_and_a_remedy():
    assert [kind.name for kind in CHECKS] == list(SICK)
    for kind in CHECKS:
        assert kind.remedy.endswith((".", "?", " FORMAT"))
        assert HealthSection().action_of(kind.name) == "warn"


@pytest.mark.parametrize("name", list(SICK))
def test_each_check_falls_ill_by_its_own_numbers_and_gets_well_again(name):
    every = checks(HealthSection())
    for step in range(1, 7):
        assert [check.look(step, healthy(step)) for check in every] == [None] * len(every)
    [check] = [check for check in every if check.name == name]
    if name in FROM_THE_START:  # it speaks of what was so from the first step on
        check.usual.values = []
    changes = [check.look(step, healthy(0) | SICK[name]) for step in range(7, 12)]
    ill = [change for change in changes if change is not None and change.state == "ill"]
    assert len(ill) == 1, "reported once"
    first = (
        8 if name in ("frozen_weights", "policy_collapse", "broken_policy") else 7
    )  # the first step with that shift has moved, after its rewards
    assert (ill[0].since, ill[0].step) == (first, first + check.options.steps - 1)
    well = [check.look(step, healthy(step)) for step in range(12, 12 + check.options.steps)]
    assert well[:-1] == [None] * (check.options.steps - 1)
    assert well[-1] is not None
    assert (well[-1].state, well[-1].since) == ("ok", 12)


@pytest.mark.parametrize("name", list(SICK))
def test_a_check_goes_on_from_its_state_as_if_it_had_never_stopped(name):
    def alarms(stop_at: int) -> list[Any]:
        [check] = [check for check in checks(HealthSection()) if check.name == name]
        found = []
        for step in range(1, 12):
            if step == stop_at:
                saved = json.loads(json.dumps(check.save()))
                [check] = [check for check in checks(HealthSection()) if check.name == name]
                check.load(saved)
            found.append(check.look(step, healthy(step) | (SICK[name] if step > 6 else {})))
        return found

    assert alarms(stop_at=0) == alarms(stop_at=5) == alarms(stop_at=8)


@pytest.mark.parametrize(("truncated", "state"), [(0.9, "ok"), (0.5, "ok"), (0.3, "suspect")])
def test_tokens_that_are_compared_on_one_side_do_not_count_as_unchecked(truncated, state):
    [check] = [check for check in checks(HealthSection()) if check.name == "unchecked"]
    check.look(1, healthy(1) | {"alignment/unchecked_share": 0.9, "alignment/truncated_share": truncated})
    assert check.state == state


@pytest.mark.parametrize(
    ("rewards", "shifts", "named"),
    [
        ([0.47, 0.0, 0.0], [35.0, 35.0, 35.0], True),  # one update at a learning rate of 1
        ([0.47, 0.4, 0.0, 0.0, 0.0], [0.1, 20.0, 20.0, 20.0, 20.0], True),
        ([-1.0, -3.0, -3.0], [35.0, 60.0, 80.0], True),
        ([0.47, 0.0, 0.0], [0.01, 0.02, 0.03], False),  # harder tasks
        ([0.0, 0.0, 0.0], [35.0, 70.0, 90.0], False),  # nothing to lose
        ([0.4, 0.45, 0.5, 0.6], [3.0, 6.0, 9.0, 12.0], False),  # it learns fast
        ([0.4, 0.1, 0.4, 0.1, 0.4], [3.0, 6.0, 9.0, 12.0, 15.0], False),  # tasks differ
    ],
)
def test_a_reward_that_falls_after_an_update_that_moved_the_policy_far_is_a_collapse(rewards, shifts, named):
    [check] = [check for check in checks(HealthSection()) if check.name == "policy_collapse"]
    changes = [
        check.look(step, {"reward/mean": reward, "policy/probe_shift_nats": shift, "learning_rate": 1.0})
        for step, (reward, shift) in enumerate(zip(rewards, shifts, strict=True), 1)
    ]
    ill = [change for change in changes if change is not None and change.state == "ill"]
    assert bool(ill) == named
    if named:
        assert f"fell to {rewards[-1]:.3g}, from" in ill[0].says and "lower trainer.learning_rate" in ill[0].remedy


def test_a_collapse_names_the_largest_move_though_no_update_follows():
    [check] = [check for check in checks(HealthSection()) if check.name == "policy_collapse"]
    for step, (reward, shift) in enumerate(zip([0.47] + [0.0] * 9, [27.0] * 10, strict=True), 1):
        check.look(step, {"reward/mean": reward, "policy/probe_shift_nats": shift})
    assert check.state == "ill" and "by up to 27 nats" in check.says


def test_a_policy_that_an_update_broke_is_not_told_to_write_longer_replies():
    [check] = [check for check in checks(HealthSection()) if check.name == "cut_off"]
    check.look(1, healthy(1))
    assert check.look(2, healthy(2) | SICK["cut_off"]) is None


def test_steps_that_take_longer_than_silence_may_last_are_learned_from_and_are_none():
    [check] = [check for check in checks(HealthSection()) if check.name == "silence"]
    for step in range(1, 6):
        assert check.look(step, healthy(step) | {"time/waiting_s": 150.0}) is None
    assert check.patience_s() == 1500.0


def test_wrong_steps_with_right_ones_between_them_make_no_run_ill():
    [collapse] = [check for check in checks(HealthSection()) if check.name == "reward_collapse"]
    assert collapse.options.steps == 3
    states = []
    for step in range(1, 13):
        collapse.look(step, healthy(step) | (SICK["reward_collapse"] if step % 3 else {}))
        states.append(collapse.state)
    assert states == ["suspect", "suspect", "ok"] * 4, "two in a row are never three"


@pytest.mark.parametrize("broken", [math.nan, math.inf, -math.inf])
def test_what_is_no_finite_number_is_named_and_times_are_not_looked_at(broken: float):
    [finite] = [check for check in checks(HealthSection()) if check.name == "not_finite"]
    assert finite.look(1, HEALTHY | {"time/step_s": broken}) is None
    change = finite.look(2, HEALTHY | {"loss": broken, "time/step_s": broken})
    assert change is not None and change.says == "not a finite number: loss"


@pytest.mark.parametrize(("name", "where", "count"), [("failed_rewards", "reward", 50), ("failed_plays", "play", 5)])
def test_a_share_of_failures_is_of_all_that_were_run(name: str, where: str, count: int):
    """One of 50 is the two percent that are let pass, one of 5 the twenty; one of the others alone is more."""
    [check] = [check for check in checks(HealthSection()) if check.name == name]
    seen = HEALTHY | {"rollouts/count": count - 1.0, "rollouts/failed": 1.0, f"rollouts/failed_{where}": 1.0}
    assert check.look(1, seen) is None
    assert check.look(2, seen | {"rollouts/count": count - 2.0}) is not None, "one more lost would be too many"


def test_numbers_that_are_not_there_say_nothing():
    for check in checks(HealthSection()):
        assert check.look(1, {"step": 1.0}) is None
        assert check.state == "ok"


def test_what_changes_slowly_becomes_usual():
    [length] = [check for check in checks(HealthSection()) if check.name == "length"]
    tokens = 100.0
    for step in range(1, 200):
        assert length.look(step, healthy(step) | {"tokens/mean": tokens}) is None
        tokens *= 1.03
    assert tokens > 10_000


def test_a_check_that_is_off_is_not_built_and_an_action_of_its_own_wins():
    section = RunConfig.model_validate(
        {"health": {"action": "stop", "length": {"action": "off"}, "entropy": {"action": "pause"}}}
    ).health
    assert "length" not in {check.name for check in checks(section)}
    assert (section.action_of("entropy"), section.action_of("advantages")) == ("pause", "stop")
    assert checks(HealthSection(action="off")) == []


def test_measure_counts_where_rollouts_failed_and_reads_entropy_off_the_samples():
    whole, part = group(1), group(2)
    part = ScoredGroup(part.draw, part.task, part.episodes, part.rewards, {}, (Failed("RuntimeError: no", "rollout"),))
    lost = ScoredGroup(part.draw, part.task, (), np.zeros(0, np.float32), {}, (Failed("DataError: nan", "reward"),) * 2)
    found = measure([whole, part], [whole.with_advantages(np.array([-3.0, 1.0]))], [lost])
    assert found == {
        "reward/max_abs": 1.0, "advantage/max_abs": 3.0, "rollouts/failed_reward": 2.0, "rollouts/failed_play": 1.0,
        "groups/partial": pytest.approx(1 / 3), "entropy/sampled": pytest.approx(0.5),
        "replies/empty": 1.0, "replies/other_turn": 0.0, "replies/looping": 0.0,
    }  # fmt: skip
    assert causes([lost, part]) == {
        "failed_rewards": "DataError: nan", "failed_plays": "RuntimeError: no", "partial_groups": "RuntimeError: no",
    }  # fmt: skip


class Noisy:
    def __init__(self) -> None:
        self.calls = 0

    async def __call__(self, task, episodes):
        self.calls += 1
        return np.array([random.random() + np.random.random() for _ in episodes], np.float32)


class Stateful(Noisy):
    def state(self):
        return {"calls": self.calls}

    def load(self, state): ...


def rescorer(*rewards: Any, **options: Any) -> Rescoring:
    weighted = [WeightedReward(f"r{n}", reward, 1.0, 5.0) for n, reward in enumerate(rewards)]
    return Rescoring(weighted, {}, **({"every": 1, "groups": 1, "deterministic": True} | options))


def scored(number: int, name: str = "r0") -> ScoredGroup:
    made = group(number)
    return ScoredGroup(made.draw, made.task, made.episodes, made.rewards, {name: made.rewards})


async def test_rescoring_finds_noise_and_puts_the_random_states_back():
    random.seed(1)
    np.random.seed(1)
    before = random.getstate(), np.random.get_state()[1].tolist()
    found = await rescorer(Noisy()).look(1, [scored(1)])
    assert found["rescore/difference"] > 0.01
    assert (random.getstate(), np.random.get_state()[1].tolist()) == before


async def test_rescoring_leaves_rewards_with_state_alone():
    stateful = Stateful()
    assert await rescorer(stateful).look(1, [scored(1)]) == {}
    assert stateful.calls == 0


async def test_rescoring_finds_a_shift_of_replies_kept_from_the_first_step_also_after_a_resume():
    class Rising:
        more = 0.0

        async def __call__(self, task, episodes):
            return np.array([episode.score + self.more for episode in episodes], np.float32)

    reward = Rising()
    first = rescorer(reward)
    assert await first.look(1, [scored(1)]) == {"rescore/difference": 0.0}
    resumed = rescorer(reward)
    resumed.load(json.loads(json.dumps(first.state())))
    reward.more = 0.25
    found = await resumed.look(2, [scored(2)])
    assert found["rescore/shift"] == pytest.approx(0.25)


async def test_a_reward_that_is_slow_to_answer_is_called_again_only_when_that_is_affordable():
    class Slow(Noisy):
        async def __call__(self, task, episodes):
            await asyncio.sleep(0.1)
            return await super().__call__(task, episodes)

    reward = Slow()
    slow = rescorer(reward)
    for step in range(1, 5):
        await slow.look(step, [scored(step)])
    assert reward.calls == 1, "a tenth of a second is half a percent of twenty"


async def test_the_environment_reward_says_the_same_again():
    assert await rescorer(EnvironmentReward()).look(1, [scored(1)]) == {"rescore/difference": 0.0}


@pytest.mark.parametrize(
    ("ends_every_s", "reported"),
    [(50.0, False), (119.0, False), (1e9, True)],
)
def test_silence_is_reported_only_while_nothing_ends(tmp_path, ends_every_s, reported):
    """Of a first step that takes an hour."""
    health = Health(HealthSection(), tmp_path)

    async def main() -> None:
        began = asyncio.get_running_loop().time()
        with health.waiting(1, lambda: int((asyncio.get_running_loop().time() - began) / ends_every_s)):
            await asyncio.sleep(3600)

    virtual_time.run(main())
    assert (tmp_path / "health.jsonl").exists() == reported

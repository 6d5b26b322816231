"""The loop in cases whose outcome can be computed by hand."""

from __future__ import annotations

import pytest

from atropos_simulation.loop_model import ClusterSize, Loop, simulate
from plugins.simulation.tests.figures_of_one import figures

AFTER_ROLLOUTS_S = 0.0625 + (0.5 + 0.01 * 100) + 0.25 + 0.125  # loop.group_s, the trainer, bridge and loop.step_s


def test_one_engine_and_one_sequence_take_exactly_what_the_figures_say():
    found = Loop(figures(), ClusterSize(1)).outcome(20, 2)
    assert found.step_s == pytest.approx(100 / 50 + AFTER_ROLLOUTS_S)
    assert found.tokens_per_s == pytest.approx(100 / found.step_s)
    assert found.trajectories_per_s == pytest.approx(1 / found.step_s)
    assert found.trainer_idle == pytest.approx(1 - 1.5 / found.step_s)
    assert found.publishing == pytest.approx(0.25 / found.step_s)


def test_strictly_on_policy_an_engine_is_idle_exactly_while_nothing_is_rolled_out():
    found = Loop(
        figures(run__groups_per_step=8, run__group_size=4, rollout__tokens=tuple(range(10, 200))), ClusterSize(1)
    ).outcome(20, 2)
    trained_s = (1 - found.trainer_idle) * found.step_s
    assert found.engine_idle * found.step_s == pytest.approx(8 * 0.0625 + trained_s + 0.25 + 0.125)
    assert found.stale_share == 0


def test_turns_environment_worker_and_hub_follow_one_another():
    given = figures(
        rollout__turns=4, rollout__environment_s=0.3, worker__rollout_s=0.4, hub__group_s=0.7, rollout__tokens=(100,)
    )
    found = Loop(given, ClusterSize(1)).outcome(6, 2)
    assert found.step_s == pytest.approx(100 / 50 + 4 * 0.3 + 0.4 + 0.7 + AFTER_ROLLOUTS_S)
    assert found.hub_busy == pytest.approx(0.7 / found.step_s)
    assert found.worker_busy == pytest.approx(0.4 / found.step_s)


@pytest.mark.parametrize("engines", [1, 3])
@pytest.mark.parametrize("staleness", [0, 1, 3])
def test_every_token_that_was_requested_was_sampled_or_is_in_flight(engines, staleness):
    given = figures(
        run__groups_per_step=6,
        run__group_size=3,
        run__max_staleness=staleness,
        rollout__tokens=tuple(range(1, 90)),
        engine__peak_tokens_per_s=100.0,
        trainer__token_s=0.0,
    )
    found = Loop(given, ClusterSize(engines, 2)).outcome(20, 4)
    assert found.tokens_in == pytest.approx(found.tokens_out + found.tokens_in_flight)
    if staleness == 0:
        assert found.tokens_in_flight == pytest.approx(0, abs=1e-6)
    else:
        assert 0 <= found.tokens_in_flight < (1 + staleness) * 6 * 3 * 90


def test_where_the_trainer_is_slowest_a_step_of_an_overlapped_run_is_its_update_alone():
    given = figures(run__max_staleness=1, trainer__step_s=50.0, rollout__environment_s=1.0)
    found = Loop(given, ClusterSize(1)).outcome(20, 4)
    assert found.step_s == pytest.approx(49.5 + AFTER_ROLLOUTS_S)


def test_where_engines_are_slowest_an_overlapped_run_samples_all_the_time_but_while_publishing():
    given = figures(run__max_staleness=1, run__groups_per_step=4, rollout__tokens=(500,), trainer__token_s=0.0)
    found = Loop(given, ClusterSize(1)).outcome(40, 4)
    assert found.engine_idle == pytest.approx(found.publishing, abs=1e-9)


def test_a_group_that_is_too_old_is_dropped_and_another_begun():
    """One of 50 rollouts has 20,000 tokens instead of 1, so the policy has newer versions when it ends."""
    given = figures(run__max_staleness=1, run__groups_per_step=4, rollout__tokens=(1,) * 49 + (20_000,))
    found = Loop(given, ClusterSize(4), seed=3).outcome(200, 4)
    assert 0 < found.stale_share < 0.1


def test_groups_that_are_left_out_are_refilled_until_the_rounds_are_over():
    base = {
        "run__groups_per_step": 50,
        "run__kept_share": 0.5,
        "engine__peak_tokens_per_s": 1e9,
        "rollout__tokens": (10,),
    }
    without = Loop(figures(**base), ClusterSize(1)).outcome(40, 2)
    refilled = Loop(figures(**base, run__refill_rounds=1), ClusterSize(1)).outcome(40, 2)
    per_step = [one.trajectories_per_s * one.step_s for one in (without, refilled)]
    assert per_step[0] == pytest.approx(50)
    assert per_step[1] == pytest.approx(75, rel=0.05)


def test_a_bridge_sends_to_one_engine_after_another_or_to_all_at_once():
    sent = {"bridge__bytes": 10.0, "bridge__bytes_per_s": 5.0}
    assert simulate(figures(**sent, bridge__at_once=False), ClusterSize(4)).step_s - simulate(
        figures(), ClusterSize(4)
    ).step_s == pytest.approx(8.0)
    assert simulate(figures(**sent), ClusterSize(4)).step_s - simulate(
        figures(), ClusterSize(4)
    ).step_s == pytest.approx(2.0)


def test_a_simulation_is_the_same_each_time():
    given = figures(
        run__groups_per_step=6, run__group_size=3, run__max_staleness=1, rollout__tokens=tuple(range(1, 90))
    )
    assert simulate(given, ClusterSize(3), rollouts=500) == simulate(given, ClusterSize(3), rollouts=500)
    assert simulate(given, ClusterSize(3), rollouts=500) != simulate(given, ClusterSize(3), rollouts=500, seed=1)

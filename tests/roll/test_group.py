"""The group filter: failed rollouts are dropped with their group, and an environment's own group scores are put in place."""

from __future__ import annotations

import copy
import json
import logging
import pickle
import re

import numpy as np
import pytest

from atropos_adapter_roll import group as module
from atropos_adapter_roll.env import AtroposEnv
from atropos_adapter_roll.group import GroupFilter
from atropos_adapter_roll.shared import shared_loop
from atropos_core.errors import ConfigError, FitError, NoProgress
from tests.roll.driver import OurNative, OurTraj, Traj, manager
from tests.roll.environments import HERE

RANKED = f"{HERE}:Ranked"


def a_filter(mode="train"):
    return GroupFilter(None, None, mode)


def group(replies, environment=RANKED, *, seed=5, **config):
    members = [
        manager(
            lambda messages, reply=reply: reply, environment=environment, group_size=len(replies), env_id=at, **config
        )
        for at, reply in enumerate(replies)
    ]
    return [member.run_episode(seed=seed) for member in members]


def scores(rollouts):
    """What ROLL reads, by every way in which it does: they must agree."""
    found = [float(rollout.non_tensor_batch["episode_scores"][-1]) for rollout in rollouts]
    for rollout, score in zip(rollouts, found, strict=True):
        assert rollout.batch["scores"].sum().item() == pytest.approx(score)
        last = int(rollout.batch["attention_mask"][-1].sum()) - 1
        assert rollout.batch["scores"][-1, last].item() == pytest.approx(score)
        steps = rollout.non_tensor_batch["step_scores"]
        assert np.sum([np.sum(step) for step in steps]) == pytest.approx(score)
    return found


@pytest.mark.parametrize(("of", "fresh"), [(OurTraj, "a"), (OurNative, "b")])
def test_a_group_is_scored_by_its_environment_as_a_whole_and_once(of, fresh):
    rollouts = group(["xx", "xxxxxx", "xxxx"], of=of, options={"label": fresh})
    task = rollouts[0].meta_info["atropos"]["task"]
    assert scores(rollouts) == [0.0, 0.0, 0.0], "not scored yet"
    assert not a_filter().filter(0, 0, rollouts)
    assert scores(rollouts) == [0.0, 1.0, 0.5]
    reported = [rollout.meta_info["metrics"]["env/Tag/score"] for rollout in rollouts]
    assert reported == [0.0, 1.0, 0.5]
    [ranked] = [e for e in shared_loop().environments._open.values() if getattr(e, "label", "") == fresh]
    assert ranked.log == [f"{task} [2, 4, 6]"], "run to its end once"


def test_members_with_the_same_reply_and_members_out_of_order_get_their_own_score():
    rollouts = group(["xxxx", "xx", "xxxx", "x"])
    a_filter().filter(0, 0, rollouts)
    assert scores(rollouts) == pytest.approx([1.0, 1 / 3, 1.0, 0.0])


def test_an_environment_may_ask_for_all_its_members_at_once():
    rollouts = group(["xx", "xxxx", "x"], f"{HERE}:RankedAtOnce")
    assert not a_filter().filter(0, 0, rollouts)
    assert scores(rollouts) == [0.5, 1.0, 0.25]


def test_a_groups_environment_is_kept_once_however_many_groups_it_scores():
    one = a_filter()
    for seed in range(4):
        assert not one.filter(0, seed, group(["x", "xx"], seed=seed, options={"label": "held"}))
    holders = shared_loop().environments._holders
    [key] = [key for key in holders if '"held"' in key]
    assert holders[key] == 4 * 2 + 1, "each member's, and the filter's"


def test_a_group_that_comes_from_other_processes_is_scored_by_what_its_rollouts_carry():
    """A record is plain data: nothing of the worker that ran is needed."""
    rollouts = group(["x", "xxx"])
    for rollout in rollouts:
        rollout.meta_info = pickle.loads(pickle.dumps(json.loads(json.dumps(rollout.meta_info))))
    a_filter().filter(0, 0, rollouts)
    assert scores(rollouts) == [0.0, 1.0]


class Elsewhere(dict):
    """Columns as ROLL has them where they are kept by another process: what is read is a copy."""

    def __getitem__(self, name):
        return copy.deepcopy(super().__getitem__(name))


def test_scores_reach_columns_that_are_kept_elsewhere():
    rollouts = group(["x", "xxx"])
    for rollout in rollouts:
        rollout.batch = Elsewhere(rollout.batch.items())
        rollout.non_tensor_batch = Elsewhere(rollout.non_tensor_batch)
    a_filter().filter(0, 0, rollouts)
    assert scores(rollouts) == [0.0, 1.0]


def test_the_reward_bridge_stands_beside_the_groups_scores():
    rollouts = group(["x!", "xxx"], reward={"environment": 2.0, "format": {"weight": 0.5, "markers": ["!"]}})
    a_filter().filter(0, 0, rollouts)
    assert scores(rollouts) == [0.5, 2.0]
    assert rollouts[0].meta_info["metrics"]["env/Tag/reward/format"] == 0.5


def test_a_group_with_several_turns_is_refused_at_once():
    with pytest.raises(FitError, match="more than one reply of a member"):
        a_filter().filter(0, 0, group(["x", "xx"], f"{HERE}:RankedInTwo"))


def test_a_group_that_cannot_be_scored_is_dropped_and_the_cause_reported(caplog):
    rollouts = group(["x", "xx"], f"{HERE}:RankedAndOneFails")
    with caplog.at_level(logging.WARNING):
        assert a_filter().filter(3, 4, rollouts)
    assert "the judge was away" in caplog.text
    assert "group 3, episode 4 is dropped" in caplog.text


def test_a_group_with_a_failed_rollout_is_dropped(caplog):
    rollouts = group(["x", "x"], f"{HERE}:One")
    rollouts += group(["x"], f"{HERE}:Raises")
    with caplog.at_level(logging.WARNING):
        assert a_filter().filter(0, 0, rollouts)
    assert "1 of 3 rollouts failed; ZeroDivisionError" in caplog.text


def test_a_group_whose_rollouts_all_ended_is_kept_as_it_is():
    rollouts = group(["x", "xxx"], f"{HERE}:One")
    before = scores(rollouts)
    assert not a_filter().filter(0, 0, rollouts)
    assert scores(rollouts) == before == [0.01, 0.03]
    assert all("atropos" not in rollout.meta_info for rollout in rollouts), "ROLL joins what is left"


def test_rollouts_of_rolls_own_managers_are_judged_by_their_metrics():
    [kept] = [manager(lambda messages: "x", of=Traj, environment=f"{HERE}:One").run_episode(seed=1)]
    [dropped] = [manager(lambda messages: "x", of=Traj, environment=f"{HERE}:Raises").run_episode(seed=1)]
    assert not a_filter().filter(0, 0, [kept])
    assert a_filter().filter(0, 0, [kept, dropped])


def test_a_placeholder_of_the_native_manager_is_dropped():
    [rollout] = [manager(lambda messages: "x", of=Traj, environment=f"{HERE}:One").run_episode(seed=1)]
    rollout.meta_info = {"metrics": {}, "drop_flag": True}
    assert a_filter().filter(0, 0, [rollout])


def test_validation_keeps_its_failures_and_shows_them():
    rollouts = group(["x"], f"{HERE}:Raises")
    assert not a_filter("val").filter(0, 0, rollouts)
    assert rollouts[0].meta_info["metrics"]["env/Tag/failed"] == 1.0


def test_validation_keeps_a_group_that_cannot_be_scored_and_shows_every_member_as_failed(caplog):
    """A score of 0 without that mark would look as if the environment had given it."""
    rollouts = group(["xx", None], of=OurNative)  # None: ROLL's generation ended at the sequence length
    judged = group(["x", "xx"], f"{HERE}:RankedAndOneFails")
    with caplog.at_level(logging.WARNING):
        assert not a_filter("val").filter(0, 0, rollouts)
        assert not a_filter("val").filter(3, 4, judged)
    for rollout in (*rollouts, *judged):
        assert rollout.meta_info["metrics"]["env/Tag/failed"] == 1.0
    assert "group 0, episode 0 is kept" in caplog.text
    assert "group 3, episode 4 is kept" in caplog.text
    assert "the judge was away" in caplog.text


def test_validation_scores_a_group_as_training_does():
    rollouts = group(["x", "xxx"])
    assert not a_filter("val").filter(0, 0, rollouts)
    assert scores(rollouts) == [0.0, 1.0]
    assert [rollout.meta_info["metrics"]["env/Tag/failed"] for rollout in rollouts] == [0.0, 0.0]


def test_one_dropped_group_after_another_ends_in_a_named_error():
    one = a_filter()
    [good], [bad] = group(["x"], f"{HERE}:One"), group(["x"], f"{HERE}:Raises")

    def again(rollout):
        record = dict(rollout.meta_info["atropos"]) if "atropos" in rollout.meta_info else kept[id(rollout)]
        kept[id(rollout)] = record
        rollout.meta_info["atropos"] = dict(record)
        return [rollout]

    kept: dict[int, dict] = {}
    for _ in range(module.PATIENCE - 1):
        assert one.filter(0, 0, again(bad))
    assert not one.filter(0, 0, again(good)), "a good one begins the count again"
    for _ in range(module.PATIENCE - 1):
        assert one.filter(0, 0, again(bad))
    with pytest.raises(NoProgress, match="ZeroDivisionError"):
        one.filter(0, 0, again(bad))


def test_a_manager_that_has_left_is_passed_over():
    [good] = group(["x"], f"{HERE}:One")
    assert not a_filter().filter(0, 0, [good, None])


def test_managers_refuse_to_go_without_the_filter():
    with pytest.raises(ConfigError, match="failed episodes would be trained as a score of 0"):
        manager(lambda messages: "x", environment=f"{HERE}:One", group_filter="roll.pipeline.agentic.GroupFilter")


@pytest.mark.parametrize(
    ("of", "pipeline", "says"),
    [
        (OurNative, {"adv_estimator": "grpo"}, "adv_estimator: grpo gives each reply its own row's score"),
        (OurNative, {"adv_estimator": "reinforce"}, "adv_estimator: reinforce"),
        (
            OurNative,
            {"adv_estimator": "agentic_reinforce"},
            "earlier replies of a right episode would be trained as wrong",
        ),
        (OurNative, {"adv_estimator": "gae"}, "adv_estimator: gae"),
        (OurNative, {"step_reward_gamma": 0.0}, "step_reinforce with step_reward_gamma: 0"),
        (OurTraj, {"adv_estimator": "step_reinforce"}, "makes one row of an episode"),
        (OurTraj, {"adv_estimator": "gigpo"}, "adv_estimator: gigpo needs a row of each reply"),
    ],
)
def test_managers_refuse_an_estimator_that_their_rows_do_not_fit(of, pipeline, says):
    with pytest.raises(ConfigError, match=re.escape(says)):
        manager(lambda messages: "x", of=of, environment=f"{HERE}:One", pipeline=pipeline)


def test_a_discount_that_takes_credit_from_early_replies_is_reported(caplog):
    manager(
        lambda messages: "x", of=OurNative, environment=f"{HERE}:One", max_steps=5, pipeline={"step_reward_gamma": 0.5}
    )
    assert "of 5 replies the first is credited with 0.0625 of what its episode earned" in caplog.text


@pytest.mark.parametrize(("mode", "said"), [("seq-mean-token-mean", True), ("token-mean", False)])
def test_a_mean_over_rows_that_counts_an_episode_for_each_reply_is_reported(caplog, mode, said):
    manager(lambda messages: "x", of=OurNative, environment=f"{HERE}:One", pipeline={"loss_agg_mode": mode})
    assert ("an episode counts once for each of its replies" in caplog.text) is said


def test_outside_of_a_group_such_an_environment_runs_a_group_of_one():
    env = AtroposEnv(environment=RANKED)
    env.reset(seed=1)
    _, reward, terminated, _, info = env.step("x")
    assert (reward, terminated, info["metrics"]["score"]) == (0.0, True, 0.0)
    env.close()

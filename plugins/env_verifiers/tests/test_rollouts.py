"""From tasks to splits, and from what verifiers says of an episode to a member of a group."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from atropos_core.errors import DeadlineExceeded, ProcessDied
from atropos_core.types import Episode, Failed, Rollout, tokens
from atropos_env_verifiers.contract import Outcome, numbers, plain
from atropos_env_verifiers.environment import member, split, with_step_rewards

ROWS = [[{"role": "user", "content": f"question {number}"}] for number in range(400)]
EPISODE = Episode(rollouts=(), score=0.0, metrics={"agent/calls": 1.0})


def of(outcome: Outcome, *failures: Any, **more: Any) -> Any:
    return member(outcome.record(), failures, more.get("episodes", {"agent": EPISODE}), more.get("success", 1.0))


def test_a_part_of_the_tasks_is_in_the_test_split_by_their_prompts_and_none_is_of_both():
    made = split(ROWS, [], 0.25)
    assert 60 < len(made["test"]) < 140 and len(made["train"]) + len(made["test"]) == 400
    assert {one.id for one in made["train"]}.isdisjoint(one.id for one in made["test"])
    again = split(ROWS[::-1], [], 0.25)
    assert {one.messages[0]["content"] for one in again["test"]} == {
        one.messages[0]["content"] for one in made["test"]
    }, "the split does not depend on a task's place"
    assert len(split(ROWS, [], 0.0)["train"]) == 400


def test_a_data_set_for_evaluation_is_the_test_split():
    made = split(ROWS[:5], ROWS[5:8], 0.25)
    assert [one.id for one in made["train"]] == [f"train/{index}" for index in range(5)]
    assert [one.data["part"] for one in made["test"]] == ["eval"] * 3


def test_an_outcome_is_the_episode_with_its_score_parts_and_metrics():
    found = of(Outcome(1.5, {"right": 1.0, "near": 0.5}, {"turns": 2.0}, "agent"), success=1.5)
    assert (found.score, found.correct, found.parts) == (1.5, True, {"right": 1.0, "near": 0.5})
    assert found.metrics == {"agent/calls": 1.0, "verifiers/turns": 2.0}
    assert of(Outcome(1.4, agent="agent"), success=1.5).correct is False


@pytest.mark.parametrize(
    ("outcome", "failures", "expected"),
    [
        (Outcome(agent="agent", error="OSError: no dice"), [None], Failed),
        (Outcome(agent="agent", error="ModelError"), [None, DeadlineExceeded("late")], DeadlineExceeded),
        (Outcome(agent="agent"), [DeadlineExceeded("late")], Episode),  # which the environment got over
        (Outcome(agent="agent"), [DeadlineExceeded("late"), ProcessDied("the engine")], ProcessDied),
    ],
)
def test_what_the_policy_raised_says_why_an_episode_failed(outcome, failures, expected):
    assert isinstance(of(outcome, *failures), expected)


def test_an_episode_without_a_call_of_the_policy_has_failed():
    found = of(Outcome(1.0, agent="agent"), episodes={"agent": None})
    assert isinstance(found, Failed) and "without a call of the policy" in found.cause


def test_steps_are_turns_only_if_each_step_is_a_trained_call():
    mask = np.array([False, True, False, True])
    rollout = Rollout(tokens([1, 2, 3, 4]), mask, mask, None, np.zeros(4, np.int32), 1.0)
    episode = Episode((rollout,), 2.0)
    made = with_step_rewards(episode, [0.5, 0.25], [(0, 2), (0, 4)])
    assert made.score == 2.0
    assert made.rollouts[0].turns.ends.tolist() == [2, 4]
    assert made.rollouts[0].turns.values.tolist() == [0.5, 0.25]
    assert with_step_rewards(episode, [0.5, 0.25, 0.0], [(0, 2), (0, 4)]) is None


def test_what_is_no_finite_number_is_no_metric_and_content_of_several_parts_is_text():
    assert numbers({"a": 1, "b": float("nan"), "c": None, "d": True}.items()) == {"a": 1.0, "d": 1.0}
    parts = [{"type": "text", "text": "look"}, {"type": "image_url", "image_url": {}}]
    assert plain([{"role": "user", "content": parts, "name": None}]) == [
        {"role": "user", "content": "look\n[image_url]"}
    ]

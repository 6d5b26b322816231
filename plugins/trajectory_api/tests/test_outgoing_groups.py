"""Groups of our own in the form of the old protocol: what an old trainer needs, in exactly its fourteen keys."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np

from atropos_core.types import Rollout, ScoredGroup
from atropos_trajectory_api.legacy_groups.outgoing_groups import KEYS, line, plain, to_wire
from tests.unit.parts import episode, group, rollout


def of(*members: tuple[float, list[Rollout]]) -> ScoredGroup:
    episodes = tuple(episode(score, "yes", *rollouts) for score, rollouts in members)
    return replace(group(0, [score for score, _ in members]), episodes=episodes)


def test_masks_and_logprobs_take_the_protocols_own_values_where_the_loss_does_not_count():
    overlong = rollout(1, 2, trained=np.array([False, True, False]))
    made = plain(to_wire(of((0.5, [overlong]))))
    assert list(made) == list(KEYS)
    assert made["tokens"] == [[10, 11, 12]]
    assert made["masks"] == [[-100, 11, -100]]
    assert made["inference_logprobs"] == [[1.0, -0.5, 1.0]]
    assert made["scores"] == [0.5]
    assert made["messages"] == [[{"role": "user", "content": "?"}, {"role": "assistant", "content": "yes"}]]
    assert made["generation_params"] == {"temperature": 1.0}
    unused = set(KEYS) - {"tokens", "masks", "inference_logprobs", "scores", "messages", "generation_params"}
    assert {made[key] for key in unused} == {None}


def test_every_rollout_is_a_sequence_with_its_episodes_score():
    made = to_wire(of((0.25, [rollout(1, 1), rollout(1, 2)]), (1.0, [rollout(0, 1)])))
    assert [len(row) for row in made["tokens"]] == [2, 3, 1]
    assert made["scores"] == [0.25, 0.25, 1.0]
    assert len(made["messages"]) == 3


def test_a_reward_goes_before_the_episodes_own_score():
    scored = replace(of((0.1, [rollout()]), (0.0, [rollout()])), rewards=np.array([0.1, 2.0], np.float32))
    assert to_wire(scored)["scores"] == [0.1, 2.0], "and 0.1 is not 0.10000000149"


def test_a_column_that_not_every_rollout_has_is_left_out():
    own = np.array([0, 1, 2], np.float32)
    made = to_wire(of((0.0, [rollout(1, 2, logprobs=None)]), (0.0, [rollout(1, 2, advantages=own)])))
    assert made["inference_logprobs"] is made["advantages"] is None
    assert plain(to_wire(of((0.0, [rollout(1, 2, advantages=own)]))))["advantages"] == [[0, 1, 2]]


def test_temperatures_that_differ_are_overrides():
    made = to_wire(of((0.0, [rollout(temperature=0.5)]), (0.0, [rollout(temperature=0.7)])))
    assert made["overrides"] == [{"temperature": 0.5}, {"temperature": 0.7}]
    assert made["generation_params"] is None


def test_a_line_is_one_json_object_also_for_a_group_of_nothing():
    text = line(of((0.0, [rollout()])))
    assert text.endswith("}\n")
    assert "\n" not in text[:-1]
    assert list(json.loads(text)) == list(KEYS)
    assert json.loads(line(of()))["tokens"] == []

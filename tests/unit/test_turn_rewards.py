"""Rewards placed inside rollouts, from an environment's score to a batch: exact values, and one error for what does not fit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings

from atropos_core import codec
from atropos_core.builtin.rewards import EnvironmentReward
from atropos_core.codec.columns import GroupColumns
from atropos_core.conversation import Conversation, Policy
from atropos_core.errors import DataError
from atropos_core.group_schema import check_episode, check_group
from atropos_core.rollouts.engine_policy import EnginePolicy
from atropos_core.rollouts.runner import RolloutRunner, WeightedReward
from atropos_core.training.batch import to_batch
from atropos_core.turn_rewards import (
    by_turn,
    mixed,
    outcome_rewards,
    placed,
    split_scores,
    turn_ends,
    turn_rewards,
    turns_in_order,
)
from atropos_core.types import (
    TURNS,
    Episode,
    Sampling,
    Score,
    ScoredGroup,
    Task,
    TurnRewards,
    offsets_of,
)
from tests.placed_rewards import GROUPS, all_written, group, rollout, written
from tests.unit.parts import TOKENIZER, SayingEngine, Words, draw


@settings(max_examples=80, deadline=None)
@given(GROUPS)
def test_a_frame_gives_back_every_bit_of_scores_and_turn_rewards(made: ScoredGroup):
    check_group(made)
    back = codec.decode(codec.encode_bytes(made))
    check_group(back)
    assert all_written(back) == all_written(made)
    by_records = codec.decode(codec.encode_bytes(list(made.episodes)))  # as a reward in another process gets them
    assert [[written(of.turns) for of in one.rollouts] for one in by_records] == [one for _, one in all_written(made)]


@settings(max_examples=80, deadline=None)
@given(GROUPS)
def test_a_batch_has_each_turn_reward_at_the_last_token_of_its_span(made: ScoredGroup):
    batch = to_batch([made], 1)
    given_rollouts = [one for episode in made.episodes for one in episode.rollouts]
    if all(one.turns is None for one in given_rollouts):
        assert TURNS not in batch.columns
        return
    column = batch.columns[TURNS]
    for start, one in zip(offsets_of([len(one.tokens) for one in given_rollouts])[:-1], given_rollouts, strict=True):
        own = slice(start, start + len(one.tokens))
        there = turn_rewards([], []) if one.turns is None else one.turns
        assert (np.flatnonzero(column.present[own]) + 1).tolist() == there.ends.tolist()
        assert column.values[own][column.present[own]].tobytes() == there.values.tobytes()
    assert not column.values[~column.present].any()
    assert not (column.present & ~batch.sampled).any()


@settings(max_examples=80, deadline=None)
@given(GROUPS)
def test_one_reward_of_weight_1_changes_no_bit_and_an_outcome_completes_the_total(made: ScoredGroup):
    for one in made.episodes:
        turns = tuple(of.turns for of in one.rollouts)
        mix = mixed(one, [(1.0, turns)])
        assert [written(of.turns) for of in mix.rollouts] == [written(of) for of in turns]
    for rest, reward, one in zip(outcome_rewards(made), made.rewards, made.episodes, strict=True):
        values = [value for of in one.rollouts if of.turns is not None for value in of.turns.values.tolist()]
        exact = Fraction(float(reward)) - sum(map(Fraction, values))
        largest = max(map(abs, [float(reward), *values]))
        assert abs(Fraction(float(rest)) - exact) <= Fraction(largest) * Fraction(2) ** -21


def test_a_total_of_turn_rewards_in_32_bits_leaves_no_outcome():
    values = [0.1, 0.2, 0.4]
    one = Episode((rollout([0, 1, 0, 1, 0, 1], turn_rewards([2, 4, 6], values)),), sum(values))
    other = replace(one, score=sum(values) + 1.0)
    assert outcome_rewards(group([one, other])).tolist() == [0.0, pytest.approx(1.0, abs=1e-6)]


def ordered(*rollouts: tuple[list[int], list[int] | None]) -> Episode:
    made = [replace(rollout(mask), turn_order=None if at is None else np.array(at, np.int64)) for mask, at in rollouts]
    return Episode(tuple(made), 0.0)


def test_turns_of_several_histories_are_in_the_order_of_time():
    one = ordered(([0, 1, 0, 1, 1], [0, 3]), ([1, 0, 1], [1, 2]))
    assert turns_in_order(one.rollouts) == [(0, 2), (1, 1), (1, 3), (0, 5)]
    made = placed(one.rollouts, [1.0, 2.0, 3.0, 4.0])
    assert [of.values.tolist() for of in made if of is not None] == [[1.0, 4.0], [2.0, 3.0]]
    as_they_are = ordered(([0, 1, 0, 1, 1], None), ([1, 0, 1], None))
    assert turns_in_order(as_they_are.rollouts) == [(0, 2), (0, 5), (1, 1), (1, 3)]


def test_a_frame_gives_back_the_order_of_turns_and_is_as_before_without_one():
    one, plain = ordered(([0, 1], [1]), ([1], [0])), ordered(([0, 1], None), ([1], None))
    for value in (group([one]), [one]):
        back = codec.decode(codec.encode_bytes(value))
        episode = back.episodes[0] if isinstance(back, ScoredGroup) else back[0]
        assert [of.turn_order.tolist() for of in episode.rollouts] == [[1], [0]]
    assert len(codec.frames.json.loads(codec.encode(group([plain]))[1])["~g"]) == 25


def test_turn_rewards_of_several_rewards_are_added_by_weight():
    one = Episode((rollout([0, 1, 1, 0, 1]), rollout([1, 1])), 0.0)
    first = (turn_rewards([3, 5], [1.0, 2.0]), None)
    second = (turn_rewards([2, 5], [8.0, 16.0]), turn_rewards([2], [4.0]))
    made = mixed(one, [(1.0, first), (0.5, second), (3.0, None)])
    assert [of.turns.ends.tolist() for of in made.rollouts] == [[2, 3, 5], [2]]
    assert [of.turns.values.tolist() for of in made.rollouts] == [[4.0, 1.0, 10.0], [2.0]]


def test_turn_rewards_that_no_reward_of_the_run_gives_are_left_out():
    one = Episode((rollout([0, 1], turn_rewards([2], [1.0])),), 1.0)
    assert mixed(one, []).rollouts[0].turns is None
    plain = Episode((rollout([0, 1]),), 1.0)
    assert mixed(plain, []) is plain


def test_an_episode_without_turn_rewards_is_written_as_before():
    plain = group([Episode((rollout([0, 1]),), 1.0)])
    assert GroupColumns.of(plain).turns is None
    assert b"TurnRewards" not in codec.encode_bytes(plain)
    assert len(codec.frames.json.loads(codec.encode(plain)[1])["~g"]) == 25


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: turn_rewards([0], [1.0]), "must rise from 1"),
        (lambda: turn_rewards([2, 2], [1.0, 1.0]), "must rise from 1"),
        (lambda: turn_rewards([2], [float("nan")]), "finite numbers"),
        (lambda: turn_rewards([2], [1.0, 2.0]), "as many float64 values"),
        (lambda: turn_rewards([1.5], [1.0]), "1.5, which is not a position"),  # type: ignore[list-item]
        (lambda: turn_rewards(["1"], [1.0]), "'1', which is not a position"),  # type: ignore[list-item]
        (lambda: turn_rewards([2**70], [1.0]), "which is not a position"),
        (lambda: turn_rewards([1], ["1"]), "'1', which is not a number"),  # type: ignore[list-item]
        (lambda: TurnRewards(np.array([2], np.int32), np.array([1.0])), "int64 ends"),
        (lambda: rollout([0, 1], turn_rewards([3], [1.0])), "ends at token 3, but there are 2 tokens"),
        (lambda: rollout([0, 1], turn_rewards([1], [1.0])), "token 0, which the policy did not sample"),
        (lambda: rollout([0, 1], turn_rewards([1, 2], [1.0, 1.0])), "token 0, which the policy did not sample"),
        (lambda: check_group(group([Episode((rollout([0, 1], turn_rewards([2], [1e10])),), 1.0)])), "turns.values[0]"),
        (lambda: ordered(([0, 1, 0, 1], [0])), "has 2 turns, and its turn order has 1"),
        (lambda: ordered(([1, 0, 1], [1, 1])), "must rise from 0"),
        (lambda: ordered(([1], [-1])), "must rise from 0"),
        (lambda: replace(rollout([1]), turn_order=[0]), "must be an int64 column"),  # type: ignore[arg-type]
        (lambda: check_group(group([ordered(([1], [0]), ([1], None))])), "in some of its rollouts only"),
        (lambda: check_group(group([ordered(([1], [0]), ([1], [0]))])), "gives one number to several turns"),
        (lambda: check_episode(ordered(([1], [0]), ([1], [0]))), "gives one number to several turns"),
        (lambda: rollout([0, 1], turns=[1.0]), "a list as `turns`, not TurnRewards"),
        (lambda: TurnRewards([2], [1.0]), "two numpy columns"),
        (lambda: placed([rollout([1, 0, 1])], [1.0]), "1 turn rewards, but the policy had 2 turns"),
        (lambda: placed([rollout([1, 0, 1])], []), "0 turn rewards, but the policy had 2 turns"),
        (lambda: placed([rollout([1])], [None, None]), "for 2 rollouts, but its episode has 1"),
        (lambda: placed([rollout([1])], ["1"]), "'1', which is not a number"),
        (lambda: placed([rollout([1])], {0: 0.5}), "which are not a list of numbers"),  # type: ignore[arg-type]
        (lambda: placed([rollout([1])], 0.5), "which are not a list of numbers"),  # type: ignore[arg-type]
        (lambda: placed([rollout([1])], [10**400]), "more than 308 digits"),
        (lambda: placed([rollout([1])], [1.0], [(0, 0)]), "sampled no token"),
        (lambda: split_scores([Score(1.0, True)], [Episode((rollout([1]),), 1.0)]), "only environments can set"),
        (
            lambda: mixed(Episode((rollout([1]),), 1.0), [(1e9, (turn_rewards([1], [2.0]),))]),
            "times their weights",
        ),
    ],
)
def test_what_does_not_fit_is_one_error(make: Any, says: str):
    with pytest.raises(DataError) as raised:
        make()
    assert says in str(raised.value)


def test_a_frame_with_other_things_for_turn_rewards_is_refused():
    made = GroupColumns.of(group([Episode((rollout([0, 1], turn_rewards([2], [1.0])),), 1.0)]))
    made.turns = ["no"]
    with pytest.raises(DataError, match="turn rewards that are none"):
        made.refuse_other_types()


def test_turns_are_the_runs_of_sampled_tokens():
    assert turn_ends(rollout([0, 1, 1, 0, 1, 0])).tolist() == [3, 5]
    assert turn_ends(rollout([1, 1])).tolist() == [2]
    assert turn_ends(rollout([0, 0])).tolist() == []


@settings(max_examples=80, deadline=None)
@given(GROUPS)
def test_rewards_by_turn_add_up_to_those_of_the_rollout(made: ScoredGroup):
    for one in (one for episode in made.episodes for one in episode.rollouts):
        values = by_turn(one)
        assert len(values) == len(turn_ends(one))
        given_values = [] if one.turns is None else one.turns.values.tolist()
        exact = sum(map(Fraction, given_values))
        largest = max(map(abs, given_values), default=0.0)
        assert abs(sum(map(Fraction, values.tolist())) - exact) <= Fraction(largest) / 2**45


def test_rewards_inside_a_turn_are_of_that_turn():
    assert by_turn(rollout([0, 1, 1, 0, 1, 1], turn_rewards([2, 3, 5], [1.0, 2.0, 4.0]))).tolist() == [3.0, 4.0]
    assert by_turn(rollout([0, 1, 0, 1])).tolist() == [0.0, 0.0]


class Turns(Words):
    """Asks twice, in two token histories if `apart`, and scores each reply."""

    def __init__(self, turns: Any, *, apart: bool = False) -> None:
        super().__init__()
        self._turns, self._apart = turns, apart

    async def rollout(self, task: Task, policy: Policy, *, seed: int) -> Episode:
        talk = Conversation(policy, seed=seed)
        await talk.reply({"role": "user", "content": "1"})
        if self._apart:
            talk.start_over()
        await talk.reply({"role": "user", "content": "2"})
        return talk.episode(Score(3.0, turns=self._turns))


async def scored(environment: Words, *rewards: WeightedReward) -> ScoredGroup:
    chosen = rewards or (WeightedReward("environment", EnvironmentReward(), 1.0, 10.0),)
    runner = RolloutRunner(
        {"words": environment}, chosen, SayingEngine(), TOKENIZER, deadline_s=30, deterministic=False
    )
    keys = runner.schedule_keys(draw(3), 2)
    return await runner.run(draw(3), keys, 2, Sampling(max_tokens=8))


@pytest.mark.parametrize("apart", [False, True])
async def test_a_score_places_its_turn_rewards_at_the_replies(apart: bool):
    made = await scored(Turns([1.0, 0.5], apart=apart))
    assert not made.failed
    for one in made.episodes:
        assert one.score == 3.0
        assert [value for of in one.rollouts for value in of.turns.values] == [1.0, 0.5]
        for of in one.rollouts:
            assert of.turns.ends.tolist() == turn_ends(of).tolist()
    assert len(made.episodes[0].rollouts) == 1 + apart
    assert made.rewards.tolist() == [3.0, 3.0]
    assert outcome_rewards(made).tolist() == [1.5, 1.5]


async def test_weights_apply_to_turn_rewards_as_to_totals():
    async def each(task: Task, episodes: Sequence[Episode]) -> list[Score | float]:
        return [Score(7.0, turns=[3.0, 4.0]), 2.0]

    environment = WeightedReward("environment", EnvironmentReward(), 0.5, 10.0)
    made = await scored(Turns([1.0, 0.5]), environment, WeightedReward("each", each, 2.0, 10.0))
    assert made.rewards.tolist() == [15.5, 5.5]
    assert [one.rollouts[0].turns.values.tolist() for one in made.episodes] == [[6.5, 8.25], [0.5, 0.25]]
    assert outcome_rewards(made).tolist() == [0.75, 4.75]
    assert made.parts["each"].tolist() == [7.0, 2.0]


@pytest.mark.parametrize(
    ("turns", "says"),
    [
        ([1.0], "1 turn rewards, but the policy had 2"),
        ([1.0, 2.0, 3.0], "3 turn rewards"),
        ([1.0, float("inf")], "finite"),
    ],
)
async def test_a_wrong_number_of_turn_rewards_fails_the_rollout_and_says_why(turns: list[float], says: str):
    made = await scored(Turns(turns))
    assert not made.episodes
    assert says in made.failed[0].cause


async def test_a_wrong_number_of_turn_rewards_of_a_reward_names_the_reward():
    async def short(task: Task, episodes: Sequence[Episode]) -> list[Score]:
        return [Score(1.0, turns=[1.0]) for _ in episodes]

    made = await scored(Turns(None), WeightedReward("short", short, 1.0, 10.0))
    assert "'short'" in made.failed[0].cause
    assert "1 turn rewards, but the policy had 2" in made.failed[0].cause


async def test_a_score_that_abstains_has_no_turn_rewards():
    policy = EnginePolicy(SayingEngine(), TOKENIZER, Sampling(max_tokens=8), deadline_s=10)
    talk = Conversation(policy, seed=1)
    await talk.reply({"role": "user", "content": "1"})
    with pytest.raises(DataError, match="abstains"):
        talk.episode(Score(0.0, abstains=True, turns=[1.0]))

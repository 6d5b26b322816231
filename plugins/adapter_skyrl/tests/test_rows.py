"""Atropos groups as rows for SkyRL, tested without SkyRL."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from fractions import Fraction
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from pydantic import ValidationError

from atropos_adapter_skyrl.adapter import SkyRLAdapter, finished
from atropos_adapter_skyrl.config import SkyRLOptions
from atropos_adapter_skyrl.dataset import TaskDataset, blocks_of
from atropos_adapter_skyrl.engine import refuse_more, sampling_of
from atropos_adapter_skyrl.row_messages import packs, unpacked
from atropos_adapter_skyrl.rows import output_of, rows_of
from atropos_core.errors import ConfigError, DataError
from atropos_core.interfaces import Environment
from atropos_core.plugins.provider import RunContext
from atropos_core.turn_rewards import turn_rewards as made_turns
from atropos_core.types import Draw, Episode, Rollout, Sampling, ScoredGroup, Task
from tests.placed_rewards import GROUPS, written

DRAW, TASK = Draw(5, "words", "train", 0, 1), Task("t", ())


def rollout(sampled: str, *, trained: str | None = None, logprobs: bool = True, **fields) -> Rollout:
    """Make a rollout. `sampled` has one letter for each token, "x" for those that the policy sampled."""
    chosen = np.array([letter == "x" for letter in sampled])
    counted = chosen if trained is None else np.array([letter == "x" for letter in trained])
    ids = np.arange(10, 10 + len(sampled), dtype=np.int32)
    return Rollout(
        ids, chosen, counted, np.where(chosen, -ids / 100, 0).astype(np.float32) if logprobs else None,
        np.where(chosen, 4, 0).astype(np.int32), 1.0, **fields,
    )  # fmt: skip


def group(*episodes: Episode, **fields) -> ScoredGroup:
    rewards = np.array([episode.score for episode in episodes], np.float32)
    return ScoredGroup(DRAW, TASK, episodes, rewards, **fields)


def shown(
    *episodes: Episode, step_wise: bool = False, own_advantages: bool = False, turn_rewards: bool = False, **fields
):
    trajectories = rows_of(group(*episodes, **fields), step_wise=step_wise)
    ids = [f"id{at}" for at in range(len(trajectories))]
    seconds = [1.0 + at for at in range(len(trajectories))]
    return output_of(
        trajectories, ids, seconds, step_wise=step_wise, own_advantages=own_advantages, turn_rewards=turn_rewards
    )


def test_a_rollout_is_cut_at_the_first_sampled_token_and_nothing_is_lost():
    made = shown(
        Episode((rollout("..xx.x."),), 0.5, finish="length", metrics={"turns": 2.0}), Episode((rollout(".x"),), 1.0)
    )
    assert made["prompt_token_ids"] == [[10, 11], [10]]
    assert made["response_ids"] == [[12, 13, 14, 15, 16], [11]]
    assert made["loss_masks"] == [[1, 1, 0, 1, 0], [1]]
    assert made["rollout_logprobs"][0] == [np.float32(-0.12), np.float32(-0.13), 0.0, np.float32(-0.15), 0.0]
    assert [one.tolist() for one in made["policy_versions"]] == [[4, 4, 0, 4, 0], [4]]
    assert made["rewards"] == [0.5, 1.0] and made["stop_reasons"] == ["length", "stop"]
    assert made["trajectory_ids"] == ["id0", "id1"] and made["trajectory_generation_times"] == [1.0, 2.0]
    assert made["env_metrics"] == [{"turns": 2.0}, {}]
    assert made["rollout_metrics"]["environment/mean_turns"] == 2.0
    assert made["rollout_metrics"]["atropos/min_policy_version"] == 4.0


def test_tokens_that_were_sampled_and_shall_not_be_trained_are_masked():
    made = shown(Episode((rollout("..xxx", trained="...x."),), 0.5))
    assert made["loss_masks"] == [[0, 1, 0]] and made["rollout_logprobs"][0][0] != 0.0


def test_step_by_step_rows_end_where_the_policy_stopped_and_the_reward_is_on_the_last():
    made = shown(Episode((rollout(".xx.x"), rollout("..x")), 0.5, finish="length"), step_wise=True)
    assert made["prompt_token_ids"] == [[10], [10, 11, 12, 13], [10, 11]]
    assert made["response_ids"] == [[11, 12], [14], [12]]
    assert made["rewards"] == [0.0, 0.0, 0.5] and made["is_last_step"] == [False, False, True]
    assert made["stop_reasons"] == ["stop", "stop", "length"] and made["trajectory_ids"] == ["id0"] * 3


def test_logprobs_are_of_all_rows_or_of_none():
    with_them, without = Episode((rollout(".x"),), 0.0), Episode((rollout(".x", logprobs=False),), 0.0)
    assert shown(without, without)["rollout_logprobs"] is None
    with pytest.raises(DataError, match="1 of 2 rows came with logprobs"):
        shown(with_them, without)


def test_advantages_of_the_environment_go_token_by_token_and_those_of_the_group_on_what_is_trained():
    own = Episode((rollout("..x.x", advantages=np.array([0, 0, 0.5, 0, -1], np.float32)),), 0.0)
    assert shown(own, own_advantages=True)["rewards"] == [[0.5, 0.0, -1.0]]
    plain = Episode((rollout("..x.x"),), 0.0)
    assert shown(plain, own_advantages=True, advantages=np.array([2.0], np.float32))["rewards"] == [[2.0, 0.0, 2.0]]
    with pytest.raises(DataError, match="the environment gave no advantages"):
        shown(plain, own_advantages=True)


def test_turn_rewards_are_at_their_tokens_and_the_outcome_is_on_the_last():
    turned = Episode((rollout("..xx.x.", turns=made_turns([4, 6], [0.25, 0.5])),), 1.0)
    plain = Episode((rollout("..x"),), 2.0)
    assert shown(turned, plain, turn_rewards=True)["rewards"] == [[0.0, 0.25, 0.0, 0.5, 0.25], [2.0]]
    assert shown(turned, plain)["rewards"] == [1.0, 2.0]
    ends_at_the_last = Episode((rollout("..x.x", turns=made_turns([3, 5], [0.25, 0.5])),), 0.75)
    assert shown(ends_at_the_last, turn_rewards=True)["rewards"] == [[0.25, 0.0, 0.5]]
    assert shown(turned, step_wise=True)["rewards"] == [0.0, 1.0], "SkyRL takes only the reward of the last step"


@settings(max_examples=60, deadline=None)
@given(GROUPS)
def test_rewards_by_token_add_up_to_the_reward_and_messages_change_no_bit(made: ScoredGroup):
    fit = [
        replace(one, rollouts=one.rollouts[:1])
        for one in made.episodes
        if one.rollouts[0].sampled.any() and not one.rollouts[0].sampled[0]
    ]
    trajectories = rows_of(group(*fit), step_wise=False)
    rewards = output_of(
        trajectories, [0] * len(fit), [0] * len(fit), step_wise=False, own_advantages=False, turn_rewards=True
    )["rewards"]
    for [row], by_token, one in zip(trajectories, rewards, fit, strict=True):
        values = [] if one.rollouts[0].turns is None else one.rollouts[0].turns.values.tolist()
        largest = max([abs(row.reward), *map(abs, values)])
        assert abs(sum(map(Fraction, by_token)) - Fraction(row.reward)) <= Fraction(largest) / 2**20
    read = [row for message in packs(trajectories) for row in unpacked(message).rows]
    assert [written(row.turns) for row in read] == [written(row.turns) for [row] in trajectories]


@pytest.mark.parametrize(
    ("made", "cause"),
    [
        (rollout("xx"), "a rollout lacks one"),
        (rollout("..."), "a rollout lacks one"),
        (rollout("..x", sft=True), "a rollout lacks one"),
        (rollout("..x", trained=".xx"), "before the first reply"),
    ],
)
def test_what_skyrl_has_no_place_for_is_refused(made, cause):
    with pytest.raises(DataError, match=cause):
        shown(Episode((made,), 0.0))


class Words(Environment):
    def __init__(self, size: int) -> None:
        self.size = size

    def tasks(self, split):
        return [Task(f"{split}-{n}", ({"role": "user", "content": f"{n}"},)) for n in range(self.size)]


def test_the_data_set_is_the_tasks_of_all_environments_and_a_row_says_which_it_is():
    data = TaskDataset({"a": Words(3), "b": Words(9)}, "test", 4)
    assert len(data) == 7
    row = data[4]
    assert row["env_class"] == "b" and row["prompt"] == [{"role": "user", "content": "1"}]
    assert row["env_extras"]["atropos"] == {"environment": "b", "split": "test", "index": 1}
    assert len({data[at]["uid"] for at in [*range(7), *range(7)]}) == 14, "also where it is the same row again"
    with pytest.raises(IndexError):
        data[7]
    with pytest.raises(DataError, match="none of a has train tasks"):
        TaskDataset({"a": Words(0)}, "train")


def rows(*repeated: tuple[str, int]):
    ids = [SimpleNamespace(instance_id=name, repetition_id=n) for name, n in repeated]
    extras = [{"atropos": {"environment": "a", "split": "train", "index": int(name)}} for name, _ in repeated]
    return {"trajectory_ids": ids, "env_extras": extras}


def test_a_block_is_one_task_and_the_same_task_twice_in_a_row_is_two_blocks():
    blocks = blocks_of(rows(("1", 0), ("1", 1), ("1", 0), ("1", 1), ("2", 0)))
    assert [(block.index, block.n) for block in blocks] == [(1, 2), (1, 2), (2, 1)]


def test_a_row_of_another_data_set_is_refused_and_the_entry_point_named():
    with pytest.raises(ConfigError, match=r"no column 'atropos'(.|\n)*override_entrypoint"):
        blocks_of({**rows(("1", 0)), "env_extras": [{"reward_spec": {}}]})
    with pytest.raises(DataError, match="which tasks they are is unknown"):
        blocks_of({"trajectory_ids": None})


def test_sampling_parameters_of_skyrl_in_our_words():
    assert sampling_of({"max_tokens": 7, "temperature": 0.5, "top_p": 0.9, "top_k": -1}) == Sampling(7, 0.5, 0.9, 0)
    assert sampling_of({"max_tokens": 7, "top_k": 20, "min_p": 0.1}) == Sampling(7, top_k=20, min_p=0.1)
    with pytest.raises(ConfigError, match="no 'max_tokens'"):
        sampling_of({})
    refuse_more({"stop": None, "min_p": 0.1, "max_tokens": 3})
    with pytest.raises(ConfigError, match=r"sampling_params.stop = \['a'\](.|\n)*atropos.source=here"):
        refuse_more({"stop": ["a"]})


@pytest.mark.parametrize(("wrong", "cause"), [({"source": "api"}, "needs url"), ({"source": "rings"}, "needs rings")])
def test_a_source_without_its_address_is_refused(wrong, cause):
    with pytest.raises(ValidationError, match=cause):
        SkyRLOptions.model_validate(wrong)


@pytest.mark.skipif(find_spec("skyrl") is not None, reason="SkyRL is installed here: tests/skyrl asks its doctor")
def test_without_skyrl_the_doctor_says_what_to_install():
    findings = SkyRLAdapter(SkyRLOptions(), RunContext(Path("."), Path("."))).doctor()
    [skyrl] = [finding for finding in findings if finding.subject == "skyrl"]
    assert skyrl.ok is False and skyrl.remedy == "pip install --no-deps skyrl==0.3.0"
    assert "one episode" not in [finding.subject for finding in findings]


async def test_the_trial_episode_runs_where_the_caller_has_a_running_loop():
    async def episode() -> str:
        await asyncio.sleep(0)
        return "4 rollouts"

    assert finished(episode()) == "4 rollouts"

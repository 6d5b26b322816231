"""Environments of the contract v0 (`load_environment`): their tokens, their rubrics' parts, their judges, kills, and training."""

from __future__ import annotations

import asyncio
import os
import re
import signal
from typing import Any

import numpy as np
import pytest

from atropos_core.errors import ConfigError, RemoteError
from atropos_core.turn_rewards import turn_ends
from atropos_core.types import Episode, Failed
from atropos_testing import check
from tests.verifiers.judge import judging
from tests.verifiers.scenes import HERE, TINY, child_of, in_ledger, opened, sampled, scripted, sums
from tests.waiting import has_ended, until
from tests.worlds.readme import run_table
from tests.worlds.training import train

FOLDER = str(HERE / "v0")
CONTRACT = "v0"
SHORT = {"model": TINY, "max_tokens": 24, "groups_per_step": 9, "deadline_s": 230}


def options_of(name: str, data: Any) -> dict[str, Any]:
    """Of each of the three that are trained."""
    files = {"datasets": {"example/sums": str(sums(data))}} if name == "sums" else {}
    return {"id": f"example/{name}", "folder": FOLDER, **files}


@pytest.mark.parametrize("name", ["sums", "guessing", "tooling"])
def test_an_environment_of_verifiers_keeps_the_contract(name, tmp_path):
    found = check("environment", "verifiers", options_of(name, tmp_path))
    assert all(one.ok is not False for one in found), [one for one in found if one.ok is False]


def test_the_tiny_policy_trains_for_five_steps_in_three_environments(tmp_path):
    made = {name: {"use": "verifiers", **options_of(name, tmp_path)} for name in ("sums", "guessing", "tooling")}
    train(tmp_path, made, **SHORT)


def test_the_table_of_the_readme_is_a_run(tmp_path):
    run_table(tmp_path, "env_verifiers", folder=FOLDER, datasets={"example/sums": str(sums(tmp_path))})


async def test_what_is_trained_is_what_was_sampled_and_its_parts_add_up_to_the_score(tmp_path):
    async with opened(tmp_path, **options_of("sums", tmp_path)) as environment:
        engine, policy = scripted(lambda prompt, seed: f"I say {seed % 5}.")
        task = environment.tasks("train")[0]
        found = await environment.rollout_group(task, policy, 4, seeds=[1, 2, 3, 4])
    ledger = in_ledger(engine)
    assert len(ledger) == 4
    for episode in found:
        ids, logprobs = sampled(episode)
        assert (tuple(ids), tuple(logprobs)) in ledger
        [rollout] = episode.rollouts
        assert rollout.trained.tolist() == rollout.sampled.tolist()
        said = int(re.findall(r"\d", episode.messages[-1]["content"])[-1])
        near = 0.5 / (1 + abs(said - 2))  # 2 plus 0
        assert episode.parts == {"correct": float(said == 2), "near": pytest.approx(near)}
        assert episode.score == pytest.approx(sum(episode.parts.values())) and episode.correct == (episode.score >= 1)
        assert episode.metrics["verifiers/characters"] == len("I say 0.") and episode.metrics["agent/calls"] == 1
    assert len({one.score for one in found}) > 1


async def test_a_reply_without_a_word_is_scored(tmp_path):
    async with opened(tmp_path, **options_of("sums", tmp_path)) as environment:
        engine, policy = scripted(lambda prompt, seed: "")
        [episode] = await environment.rollout_group(environment.tasks("train")[0], policy, 1, seeds=[1])
    assert episode.score == 0.0 and sampled(episode)[0] == engine.ledger[0].tokens.tolist()


async def test_a_conversation_of_several_turns_is_one_history_that_only_grows(tmp_path):
    async with opened(tmp_path, **options_of("guessing", tmp_path)) as environment:
        engine, policy = scripted(lambda prompt, seed: str(prompt.count("higher") + prompt.count("lower")))
        task = environment.tasks("train")[1]  # 2 plus 3: the answer is 5, and three turns say 0, 1, 2
        [episode] = await environment.rollout_group(task, policy, 1, seeds=[7])
    [rollout] = episode.rollouts
    assert [message["content"] for message in episode.messages] == [
        "What is 2 plus 3?", "0", "higher", "1", "higher", "2"
    ]  # fmt: skip
    first, second, third = engine.ledger
    assert rollout.tokens.tolist() == [*third.prompt.tolist(), *third.tokens.tolist()]
    assert third.prompt.tolist()[: len(second.prompt)] == second.prompt.tolist()
    assert sampled(episode)[0] == [*first.tokens.tolist(), *second.tokens.tolist(), *third.tokens.tolist()]
    assert episode.metrics["verifiers/turns"] == 3 and rollout.turns is None


async def test_a_reward_of_the_group_sees_all_of_it(tmp_path):
    async with opened(tmp_path, **options_of("guessing", tmp_path)) as environment:
        task = environment.tasks("train")[1]
        _, policy = scripted(lambda prompt, seed: "5" if seed % 2 else "0")
        found = await environment.rollout_group(task, policy, 6, seeds=list(range(6)))
    turns = [one.metrics["verifiers/turns"] for one in found]
    assert set(turns) > {min(turns)}, "no two of them differ, so that this shows nothing"
    assert [one.parts["rank"] for one in found] == [0.25 * (turn == min(turns)) for turn in turns]


async def test_the_reward_of_a_step_is_the_turn_reward_of_its_reply(tmp_path):
    async with opened(tmp_path, **options_of("guessing", tmp_path), config={"steps": True}) as environment:
        _, policy = scripted(lambda prompt, seed: str(prompt.count("higher") + prompt.count("lower")))
        [episode] = await environment.rollout_group(environment.tasks("train")[1], policy, 1, seeds=[7])
    [rollout] = episode.rollouts
    assert rollout.turns.values.tolist() == [1 - 5 / 8, 1 - 4 / 8, 0.0], "the last guess got no answer"
    assert rollout.turns.ends.tolist() == turn_ends(rollout).tolist()
    assert episode.score == pytest.approx(sum(episode.parts.values()))


async def test_a_tool_is_called_and_its_answer_is_context(tmp_path):
    call = '<tool_call>\n{"name": "calculate", "arguments": {"expression": "100+20"}}\n</tool_call>'
    async with opened(tmp_path, **options_of("tooling", tmp_path)) as environment:
        engine, policy = scripted(lambda prompt, seed: "120" if "<tool_response>" in prompt else call)
        [episode] = await environment.rollout_group(environment.tasks("train")[0], policy, 1, seeds=[1])
    assert [message["role"] for message in episode.messages] == ["user", "assistant", "tool", "assistant"]
    assert episode.messages[2]["content"] == "120"
    assert episode.parts == {"right": 1.0, "used": pytest.approx(0.3)}
    assert sampled(episode)[0] == [*engine.ledger[0].tokens.tolist(), *engine.ledger[1].tokens.tolist()]
    assert episode.metrics["verifiers/total_tool_calls"] == 1


async def test_a_judge_of_another_model_scores_and_none_of_its_tokens_is_trained(tmp_path):
    with judging("yes, it is") as judge:
        config = {"judge": judge.url}
        async with opened(tmp_path, **options_of("tooling", tmp_path), config=config) as environment:
            engine, policy = scripted(lambda prompt, seed: "120")
            [episode] = await environment.rollout_group(environment.tasks("train")[0], policy, 1, seeds=[1])
    assert len(judge.asked) == 1 and "120" in str(judge.asked[0])
    assert episode.parts["liked"] == pytest.approx(0.1) and episode.metrics["agent/calls"] == 1
    assert len(engine.ledger) == 1 and sampled(episode)[0] == engine.ledger[0].tokens.tolist()


async def test_rollouts_that_fail_are_named_and_the_others_of_their_group_are_whole(tmp_path):
    config = {"answers": ["raise", "fail"]}
    async with opened(tmp_path, **options_of("guessing", tmp_path), config=config) as environment:
        tasks = {one.messages[0]["content"]: one for split in ("train", "test") for one in environment.tasks(split)}
        _, policy = scripted(lambda prompt, seed: "1")
        raised = await environment.rollout_group(tasks["What is 2 plus 2?"], policy, 2, seeds=[1, 2])
        failed = await environment.rollout_group(tasks["What is 2 plus 3?"], policy, 2, seeds=[1, 2])
    assert all(isinstance(one, Failed) and one.cause == "OSError: the dice are gone" for one in raised), raised
    assert all(isinstance(one, Failed) and "ToolError('the dice are broken')" in one.cause for one in failed), failed


async def test_kill_9_of_its_process_fails_its_rollouts_by_name_and_it_is_started_again(tmp_path):
    async with opened(tmp_path, **options_of("guessing", tmp_path)) as environment:
        engine, policy = scripted(lambda prompt, seed: "1")
        tasks = environment.tasks("train")
        engine.hold.clear()
        going = asyncio.ensure_future(environment.rollout_group(tasks[0], policy, 4, seeds=range(4)))
        while engine.waiting < 4:
            await asyncio.sleep(0.02)
        os.kill(child_of().pid, signal.SIGKILL)
        with pytest.raises(RemoteError, match="environment-test .* was killed by SIGKILL"):
            await going
        engine.hold.set()
        again = await environment.rollout_group(tasks[0], policy, 4, seeds=range(4))
    assert all(isinstance(one, Episode) and sampled(one)[0] for one in again)


async def test_another_process_with_other_tasks_is_not_taken_for_the_first(tmp_path):
    config = {"seeded": False}
    async with opened(tmp_path, **options_of("guessing", tmp_path), config=config) as environment:
        _, policy = scripted(lambda prompt, seed: "1")
        child = child_of()
        child.send_signal(signal.SIGKILL)
        await until(lambda: has_ended(child.pid), "the end of its process")
        await asyncio.sleep(0.05)  # a turn of the loop, which hears of it
        with pytest.raises(Exception, match="loaded again and its tasks differ"):
            await environment.rollout_group(environment.tasks("train")[0], policy, 1, seeds=[1])


async def test_tasks_are_split_by_their_prompts_where_the_environment_has_no_data_set_for_evaluation(tmp_path):
    async with opened(tmp_path, **options_of("guessing", tmp_path), held_out=0.5) as environment:
        train, test = environment.tasks("train"), environment.tasks("test")
    assert len(train) + len(test) == 42 and min(len(train), len(test)) > 12
    async with opened(tmp_path, **options_of("guessing", tmp_path), held_out=0.5) as environment:
        assert [one.id for one in environment.tasks("test")] == [one.id for one in test]
    async with opened(tmp_path, **options_of("sums", tmp_path), tasks=10) as environment:
        assert [len(environment.tasks(split)) for split in ("train", "test")] == [10, 10]
        assert environment.tasks("test")[0].messages[0]["content"] == "What is 90 plus 0?"
        assert environment.source() == "example/sums of verifiers, contract v0"


async def test_its_arguments_reach_load_environment_and_success_is_what_counts_as_correct(tmp_path):
    config = {"near_weight": 1.0, "system": "Be brief.", "evaluates": False}
    files = {"example/sums": str(sums(tmp_path))}
    async with opened(
        tmp_path, id="example/sums", folder=FOLDER, datasets=files, config=config, success=0.4
    ) as environment:
        task = environment.tasks("train")[0]
        assert [one["role"] for one in task.messages] == ["system", "user"]
        _, policy = scripted(lambda prompt, seed: "3")
        [episode] = await environment.rollout_group(task, policy, 1, seeds=[1])
    assert episode.parts["near"] == 0.5 and episode.correct
    assert np.isclose(episode.score, 0.5)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"id": "nothing"}, "environment 'nothing' has no module 'nothing' on this machine.*\n.*folder"),
        ({"id": "sums", "config": {"near_wait": 1}}, "'sums' could not be loaded.*near_wait.*\n.*config"),
        ({"id": "sums", "held_out": 0.2}, "held_out has no effect on sums"),
        ({"id": "lacks"}, "'lacks' imports 'a_package_that_nobody_has', which is not installed"),
        ({"id": "newer"}, "'newer' is of the contract v1.*\n.*pip install verifiers==0.4.0"),
        ({"id": "empty"}, "its tasks could not be loaded.*FileNotFoundError"),
    ],
)
async def test_what_cannot_be_loaded_is_named(tmp_path, options, says):
    given = {**options_of("sums", tmp_path), **options}
    if options["id"] == "empty":
        given["config"] = {"source": "example/others"}
        given["id"] = "lazy"
    with pytest.raises(ConfigError, match=f"(?s){says}"):
        async with opened(tmp_path, **given):
            pass


async def test_loading_that_takes_too_long_is_named(tmp_path):
    with pytest.raises(Exception, match="open_environment\\(\\) gave no answer within 1 s"):
        async with opened(tmp_path, id="hangs", folder=FOLDER, open_deadline_s=1.0):
            pass

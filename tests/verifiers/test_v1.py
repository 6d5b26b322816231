"""Environments of the contract v1 (tasksets): their tokens, their rewards' parts, untrained agents, kills, and training."""

from __future__ import annotations

import asyncio
import os
import re
import signal
from typing import Any

import pytest

from atropos_core.errors import ConfigError, RemoteError
from atropos_core.types import Episode, Failed
from atropos_testing import check
from tests.verifiers.scenes import HERE, TINY, child_of, in_ledger, opened, sampled, scripted, sums
from tests.worlds.training import train

FOLDER = str(HERE / "v1")
CONTRACT = "v1"
SHORT = {"model": TINY, "max_tokens": 24, "groups_per_step": 9, "deadline_s": 230}
CHATTING = {"harness": {"id": "chatting"}}


def options_of(name: str, data: Any) -> dict[str, Any]:
    """Of each of the three that are trained."""
    if name == "guessing":
        return {"id": "example/guessing", "folder": FOLDER, "tasks": 49}
    config: dict[str, Any] = {"agent": CHATTING}
    if name == "sums":
        config["taskset"] = {"source": str(sums(data) / "train.jsonl")}
    return {"id": f"example/{name}", "folder": FOLDER, "config": config}


@pytest.mark.parametrize("name", ["sums", "guessing", "tooling"])
def test_an_environment_of_verifiers_keeps_the_contract(name, tmp_path):
    found = check("environment", "verifiers", options_of(name, tmp_path))
    assert all(one.ok is not False for one in found), [one for one in found if one.ok is False]


def test_the_tiny_policy_trains_for_five_steps_in_three_environments(tmp_path):
    made = {name: {"use": "verifiers", **options_of(name, tmp_path)} for name in ("sums", "guessing", "tooling")}
    train(tmp_path, made, **SHORT)


async def test_what_is_trained_is_what_was_sampled_and_its_parts_add_up_to_the_score(tmp_path):
    async with opened(tmp_path, **options_of("sums", tmp_path)) as environment:
        engine, policy = scripted(lambda prompt, seed: f"I say {seed % 5}.")
        task = environment.tasks("train")[0]
        found = await environment.rollout_group(task, policy, 4, seeds=[1, 2, 3, 4])
        assert environment.source() == "example/sums of verifiers, contract v1"
    numbers = [int(one) for one in re.findall(r"\d+", task.messages[0]["content"])]
    ledger = in_ledger(engine)
    assert len(ledger) == 4
    for episode in found:
        ids, logprobs = sampled(episode)
        assert (tuple(ids), tuple(logprobs)) in ledger
        said = int(re.findall(r"\d", episode.messages[-1]["content"])[-1])
        near = 0.5 / (1 + abs(said - sum(numbers)))
        assert episode.parts == {"correct": float(said == sum(numbers)), "near": pytest.approx(near)}
        assert episode.score == pytest.approx(sum(episode.parts.values()))
        assert episode.metrics["verifiers/characters"] == len("I say 0.") and episode.metrics["agent/calls"] == 1
    assert len({one.score for one in found}) > 1


async def test_a_conversation_of_several_turns_is_one_history_that_only_grows(tmp_path):
    async with opened(tmp_path, **options_of("guessing", tmp_path), held_out=0.0) as environment:
        engine, policy = scripted(lambda prompt, seed: str(prompt.count("higher") + prompt.count("lower")))
        task = environment.tasks("train")[1]  # 2 plus 3: the answer is 5, and three turns say 0, 1, 2
        [episode] = await environment.rollout_group(task, policy, 1, seeds=[7])
    [rollout] = episode.rollouts
    assert [message["content"] for message in episode.messages] == [
        "What is 2 plus 3?", "0", "higher", "1", "higher", "2"
    ]  # fmt: skip
    first, second, third = engine.ledger
    assert rollout.tokens.tolist() == [*third.prompt.tolist(), *third.tokens.tolist()]
    assert sampled(episode)[0] == [*first.tokens.tolist(), *second.tokens.tolist(), *third.tokens.tolist()]
    assert episode.parts == {"closeness": pytest.approx(0.7)}


async def test_an_agent_that_is_not_trainable_samples_and_none_of_its_tokens_is_trained(tmp_path):
    config = {"watched": True, "turns": 1}
    async with opened(tmp_path, **options_of("guessing", tmp_path), config=config) as environment:
        engine, policy = scripted(lambda prompt, seed: "no" if "Was that right" in prompt else "4")
        found = await environment.rollout_group(environment.tasks("train")[0], policy, 2, seeds=[1, 2])
    assert len(engine.ledger) == 4
    for episode in found:
        assert [message["content"] for message in episode.messages][1:] == ["4"]
        assert len(episode.rollouts) == 1 and episode.metrics["agent/calls"] == 1


async def test_an_episode_with_two_trained_agents_fails_by_name(tmp_path):
    config = {"watched": True, "both": True, "turns": 1}
    async with opened(tmp_path, **options_of("guessing", tmp_path), config=config) as environment:
        _, policy = scripted(lambda prompt, seed: "4")
        [found] = await environment.rollout_group(environment.tasks("train")[0], policy, 1, seeds=[1])
    assert isinstance(found, Failed) and "one trained agent run, and this one has 2 (agent, watcher)" in found.cause


async def test_a_tool_server_is_called_and_its_answer_is_context(tmp_path):
    call = '<tool_call>\n{"name": "calculate", "arguments": {"expression": "100+20"}}\n</tool_call>'
    async with opened(tmp_path, **options_of("tooling", tmp_path), held_out=0.0) as environment:
        engine, policy = scripted(lambda prompt, seed: "120" if "<tool_response>" in prompt else call)
        [episode] = await environment.rollout_group(environment.tasks("train")[0], policy, 1, seeds=[1])
    assert [message["role"] for message in episode.messages] == ["user", "assistant", "tool", "assistant"]
    assert episode.messages[2]["content"] == "120"
    assert episode.parts == {"right": 1.0, "used": pytest.approx(0.3)}
    assert sampled(episode)[0] == [*engine.ledger[0].tokens.tolist(), *engine.ledger[1].tokens.tolist()]


async def test_a_rollout_that_fails_is_named(tmp_path):
    """A harness that needs a container cannot run here."""
    options = options_of("sums", tmp_path)
    options["config"]["agent"] = {"harness": {"id": "codex"}}
    async with opened(tmp_path, **options) as environment:
        _, policy = scripted(lambda prompt, seed: "4")
        found = await environment.rollout_group(environment.tasks("train")[0], policy, 2, seeds=[1, 2])
    assert all(isinstance(one, Failed) and "'codex' needs a container runtime" in one.cause for one in found), found


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


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"id": "nothing"}, "environment 'nothing' has no module 'nothing' on this machine.*\n.*folder"),
        ({"config": {"taskset": {"sauce": "x"}}}, "'example/sums' could not be loaded.*sauce.*\n.*config"),
        ({"id": "older"}, "'older' is of the contract v0.*\n.*pip install verifiers==0.1.14"),
        ({"config": {"taskset": {"source": "nowhere.jsonl"}}}, "its tasks could not be loaded.*FileNotFoundError"),
    ],
)
async def test_what_cannot_be_loaded_is_named(tmp_path, options, says):
    with pytest.raises(ConfigError, match=f"(?s){says}"):
        async with opened(tmp_path, **{**options_of("sums", tmp_path), **options}):
            pass

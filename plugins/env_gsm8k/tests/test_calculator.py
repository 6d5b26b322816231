"""The environment `calculator`, by scripted replies: what the tool says, what is scored, what is trained."""

from __future__ import annotations

import json

import pytest

from atropos_core.types import Episode
from atropos_env_gsm8k.calculator import CODES, Calculator, calculate, problem
from atropos_testing import environment_contract
from atropos_testing.scripted import Script, ScriptedPolicy

test_contract = environment_contract("calculator")

ENVIRONMENT = Calculator()
TASK = ENVIRONMENT.tasks("test")[0]
OPERATIONS, ANSWER = problem(CODES[0])[1:]


def call(expression: object, name: str = "calculate") -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': {'expression': expression}})}</tool_call>"


async def episode_of(*replies: str) -> tuple[Episode, ScriptedPolicy]:
    left = iter(replies)
    policy = ScriptedPolicy(Script("scripted", lambda task, seed: next(left)), TASK)
    return await ENVIRONMENT.rollout(TASK, policy, seed=0), policy


def results(episode: Episode) -> list[str]:
    return [message["content"] for message in episode.messages if message["role"] == "tool"]


@pytest.mark.parametrize(
    ("expression", "value"), [("7*6", "42"), (" 12 - 30 ", "-18"), ("-5+2", "-3"), ("7/2", "3.5"), ("999999*999999", "999998000001")]
)  # fmt: skip
def test_the_calculator_calculates(expression, value):
    assert calculate(expression) == value


async def test_a_call_for_each_operation_and_the_last_result_as_answer_is_worth_one():
    assert len(OPERATIONS) == 2
    episode, policy = await episode_of(*map(call, OPERATIONS), f"#### {ANSWER}")
    assert (episode.score, episode.correct) == (1.0, True)
    assert results(episode) == [calculate(one) for one in OPERATIONS]
    assert episode.metrics == {"tools/calls": 2.0, "tools/errors": 0.0, "tools/out_of_turns": 0.0}
    [rollout] = episode.rollouts
    trained = rollout.tokens[rollout.trained].tolist()
    assert trained == [one for reply in policy.given for one in reply.tolist()], (
        "the replies, and nothing of the tool's"
    )


async def test_several_calls_in_a_reply_are_answered_in_their_order():
    episode, _ = await episode_of(call("1+1") + call("2*9"), "#### 0")
    assert results(episode) == ["2", "18"]
    assert (episode.score, episode.metrics["tools/calls"]) == (0.0, 2.0)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (call("37*4 pins"), "error: not one operation on two numbers"),
        (call("1/0"), "error: division by zero"),
        (call("1+1", "add"), "error: there is no tool 'add'"),
        ('<tool_call>{"name": "calculate"}</tool_call>', "error: calculate() missing 1 required"),
        ('<tool_call>{"name": "calculate", "arguments": {"sum": 1}}</tool_call>', "error: calculate() got an unexpected"),
        (call(17), "error: expected string"),
    ],
)  # fmt: skip
async def test_the_policy_reads_an_error_of_the_tool_and_may_still_be_right(wrong, says):
    episode, _ = await episode_of(wrong, f"#### {ANSWER}")
    [result] = results(episode)
    assert result.startswith(says)
    assert (episode.correct, episode.metrics["tools/errors"]) == (True, 1.0)


async def test_who_still_calls_in_the_last_turn_is_wrong_whatever_else_it_says():
    episode, _ = await episode_of(*[f"#### {ANSWER} {call('1+1')}"] * ENVIRONMENT.turns)
    assert len(results(episode)) == ENVIRONMENT.turns - 1
    assert (episode.correct, episode.metrics["tools/out_of_turns"]) == (False, 1.0)


async def test_a_call_that_cannot_be_read_is_an_answer_and_a_wrong_one():
    episode, _ = await episode_of('<tool_call>{"name": "calculate", "arguments": "37*4"}</tool_call>')
    assert (episode.correct, episode.metrics["tools/calls"]) == (False, 0.0)

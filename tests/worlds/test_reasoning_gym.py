"""reasoning-gym's own generators and scorers: the contract, what a resume needs, hostile answers, kills, and training."""

from __future__ import annotations

import asyncio
import os
import signal
from typing import Any

import psutil
import pytest

from atropos_core.errors import ConfigError, DataError, DeadlineExceeded, WorkerLost
from atropos_env_reasoning_gym.config import ReasoningGymOptions
from atropos_env_reasoning_gym.environment import ReasoningGym
from atropos_testing import check
from tests.worlds.training import train

TRAINED: dict[
    str, dict[str, Any]
] = {  # by data set, what makes it easy enough for the tiny policy to guess some answers
    "basic_arithmetic": {"max_terms": 2, "max_digits": 1, "allow_parentheses": False},
    "chain_sum": {"max_terms": 2, "max_digits": 1},
    "binary_alternation": {"max_n": 12},
    "count_bits": {"max_n": 30},
    "count_primes": {"max_n": 20},
    "gcd": {},
    "number_sequence": {"max_complexity": 1, "max_value": 9, "min_value": 0},
    "leg_counting": {"min_animals": 2, "max_animals": 2, "max_instances": 2},
    "letter_counting": {},
    "products": {"max_digits": 1},
}


def made(**options: Any) -> ReasoningGym:
    return ReasoningGym(ReasoningGymOptions(**{"tasks": 60, "held_out": 20, **options}))


async def score(environment: ReasoningGym, task: Any, text: str) -> Any:
    return await environment.score(task, {"role": "assistant", "content": text})


def options_of(dataset: str) -> dict[str, Any]:
    return {
        "dataset": dataset,
        "parameters": {dataset: TRAINED[dataset]},
        "answer": "whole",
        "tasks": 60,
        "held_out": 20,
    }


@pytest.mark.parametrize("dataset", TRAINED)
def test_a_data_set_keeps_the_contract(dataset):
    found = check("environment", "reasoning_gym", options_of(dataset))
    assert all(one.ok is not False for one in found), [one for one in found if one.ok is False]


def test_the_tiny_policy_trains_for_five_steps_on_each_of_ten_data_sets(tmp_path):
    train(tmp_path, {dataset: {"use": "reasoning_gym", **options_of(dataset)} for dataset in TRAINED})


async def test_the_same_draw_gives_the_same_task_whatever_the_hash_seed(monkeypatch):
    """The tasks of ransom_note follow Python's hash seed, where it is not fixed."""
    seen = []
    for seed in ("1", "2"):
        monkeypatch.setenv("PYTHONHASHSEED", seed)
        environment = made(dataset="ransom_note")
        await environment.open()
        seen.append([task.messages for task in environment.tasks("train")])
        await environment.close()
    assert seen[0] == seen[1]


async def test_no_question_of_a_small_data_set_is_in_both_splits():
    environment = made(dataset="coin_flip", tasks=300, held_out=100)
    await environment.open()
    questions = [{task.messages[-1]["content"] for task in environment.tasks(split)} for split in ("train", "test")]
    assert [len(environment.tasks(split)) for split in ("train", "test")] == [300, 100]
    assert len(questions[0]) < 300, (
        "a question comes back in the training split, so that chance would take it to the other"
    )
    assert not questions[0] & questions[1]
    await environment.close()


async def test_a_mixture_has_its_parts_by_weight_and_levels_that_a_prior_reads():
    environment = made(
        mixture={"chain_sum": 3.0, "leg_counting": 1.0},
        levels=[0, 2],
        tasks=80,
        parameters={"chain_sum": {"max_digits": 2}},
    )
    await environment.open()
    tasks = environment.tasks("train")
    assert sum(task.data["dataset"] == "chain_sum" for task in tasks) == 60
    assert sorted({task.data["level"] for task in tasks}) == [0, 2]
    hard = [len(task.messages[-1]["content"]) for task in tasks if task.data["level"] == 2]
    easy = [len(task.messages[-1]["content"]) for task in tasks if task.data["level"] == 0]
    assert sum(hard) / len(hard) > sum(easy) / len(easy)
    await environment.close()


async def test_another_seed_makes_other_tasks_and_the_instruction_is_what_was_given():
    first, second = made(dataset="gcd"), made(dataset="gcd", seed=1, instruction="", answer="marked")
    for environment in (first, second):
        await environment.open()
        await environment.close()
    assert {task.messages[-1]["content"] for task in first.tasks("train")}.isdisjoint(
        task.messages[-1]["content"] for task in second.tasks("train")
    )
    assert "<answer>" in first.tasks("train")[0].messages[0]["content"]
    assert [message["role"] for message in second.tasks("train")[0].messages] == ["user"]
    assert second.tasks("train")[0].answer.startswith("#### ")


async def test_a_task_that_takes_too_long_to_make_is_named():
    environment = made(dataset="knight_swap", making_deadline_s=0.05)
    with pytest.raises(DeadlineExceeded, match="a task of reasoning-gym's knight_swap took more than 0.05 s to make"):
        await environment.open()
    await environment.close()


async def test_an_answer_of_none_is_scored_and_a_task_without_one_has_no_oracle():
    environment = made(dataset="boxnet", tasks=3, held_out=1)
    await environment.open()
    task = environment.tasks("train")[0]
    assert task.answer is None
    assert (await score(environment, task, "no tag at all")).value == 0.0
    unreadable = await score(environment, task, "<answer>12</answer>")
    assert (unreadable.value, unreadable.metrics["reasoning_gym/unreadable"]) == (0.0, 1.0)
    await environment.close()


async def test_a_scorer_that_never_ends_is_ended_and_the_next_answer_is_scored():
    environment = made(dataset="countdown", tasks=2, held_out=1, scoring_deadline_s=3.0)
    await environment.open()
    task = environment.tasks("train")[0]
    hanging = await score(environment, task, "<answer>9**9**9**9</answer>")
    assert (hanging.value, hanging.metrics["reasoning_gym/late"]) == (0.0, 1.0)
    environment._options = environment._options.model_copy(update={"scoring_deadline_s": 60.0})
    assert (await score(environment, task, task.answer)).correct
    await environment.close()


async def test_kill_9_of_the_scoring_process_fails_one_rollout_by_name_and_it_is_started_again():
    environment = made(dataset="countdown", tasks=2, held_out=1)
    await environment.open()
    task = environment.tasks("train")[0]
    [child] = [one for one in psutil.Process().children() if "reasoning_gym" in " ".join(one.cmdline())]
    idle_s = child.cpu_times().user
    scoring = asyncio.ensure_future(score(environment, task, "<answer>9**9**9**9</answer>"))
    async with asyncio.timeout(30):
        while child.cpu_times().user < idle_s + 0.1:
            await asyncio.sleep(0.01)
    os.kill(child.pid, signal.SIGKILL)
    with pytest.raises(WorkerLost, match="was killed by SIGKILL"):
        await scoring
    assert (await score(environment, task, task.answer)).correct
    await environment.close()


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"dataset": "chain_sums"}, ConfigError, "no data set 'chain_sums'.*\n.*'chain_sum'"),
        ({"dataset": "gcd", "parameters": {"gcd": {"min_number": 1}}}, ConfigError, "no tasks of gcd.*min_number"),
        ({"dataset": "gcd", "parameters": {"gcd": {"max_value": 0}}}, ConfigError, "no tasks of gcd"),
        ({"dataset": "acre", "levels": [1]}, ConfigError, "acre has no levels"),
        (
            {"dataset": "gcd", "held_out": 1, "parameters": {"gcd": {"max_value": 2, "max_numbers": 2}}},
            DataError,
            "gcd has too few different questions",
        ),
    ],
)  # fmt: skip
async def test_what_makes_no_tasks_is_named(options, error, says):
    environment = made(**options)
    try:
        with pytest.raises(error, match=f"(?s){says}"):
            await environment.open()
    finally:
        await environment.close()

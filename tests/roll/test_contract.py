"""What ROLL's env managers want of a gem.Env. The number in a name is that of the item in ROLL's contract:

1 made by gem from a DictConfig under an id of its own; 2 reset and seeds; 3 step; 4 observations; 5 metrics and tools;
6 what the native manager reads; 7 threads and scores; 8 groups over several workers.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import threading

import gem
import pytest
from gem.envs.registration import ENV_REGISTRY
from omegaconf import OmegaConf

from atropos_adapter_roll import env as ours
from atropos_adapter_roll.trial import SYSTEM, Stock, right_replies
from atropos_core.errors import AtroposError, ConfigError, DataError, FitError, UnknownComponent
from tests.conftest import REPOSITORY
from tests.roll.driver import EpisodeStopReason, Native, OurNative, OurTraj, manager
from tests.roll.environments import HERE

ONE = f"{HERE}:One"
STOCK = "atropos_adapter_roll.trial:Stock"
TAKEN = {  # keys of ROLL's own history
    "observation", "actions_left", "messages", "reward", "llm_response", "prompt_ids", "response_ids", "infer_logprobs",
    "state_hash",
}  # fmt: skip


def make(environment=ONE, **config):
    return gem.make("atropos", environment=environment, **config)


def stock_policy(messages):
    """Answers rightly, whichever way the conversation is shown."""
    requested = next(message["content"] for message in messages if "Fill the shelf" in message["content"])
    number = int(requested.rpartition("item ")[2].rstrip("."))
    task = Stock().tasks("train")[number]
    return right_replies(task)[sum(message["role"] == "assistant" for message in messages)]


def test_1_it_is_made_from_a_dictconfig_as_it_comes_from_yaml():
    config = OmegaConf.create(
        {"environment": "gsm8k", "options": {"seed": 3}, "reward": {"format": {"markers": ["\\boxed{}", "<think>"]}}}
    )
    env = gem.make(env_id="atropos", **config)
    assert isinstance(env, gem.Env)
    assert env.options.reward.format.markers == ("\\boxed{}", "<think>")
    assert env.options.options == {"seed": 3}
    env.close()


def test_1_registering_again_changes_nothing_and_another_ones_name_is_not_taken():
    ours.register()
    before = ENV_REGISTRY["atropos"]
    try:
        ENV_REGISTRY["atropos"] = type(before)("atropos", "somebody.else:Env")
        with pytest.raises(AtroposError, match="not ours"):
            ours.register()
    finally:
        ENV_REGISTRY["atropos"] = before
    other = ENV_REGISTRY.get("atropos_env")
    assert other is None or other.entry_point.startswith("roll."), "that name is ROLL's"


def test_1_a_worker_that_imports_the_managers_has_the_environment_and_nothing_else_is_touched():
    script = """
import asyncio, signal, sys
before = [signal.getsignal(number) for number in signal.valid_signals()], asyncio.get_event_loop_policy()
import gem, threading
gems = [signal.getsignal(number) for number in signal.valid_signals()]
import atropos_adapter_roll.managers
assert gems == before[0] == [signal.getsignal(number) for number in signal.valid_signals()]
assert asyncio.get_event_loop_policy() is before[1]
assert threading.active_count() == 1
assert not {"torch", "ray", "tqdm"} & set(sys.modules), {"torch", "ray", "tqdm"} & set(sys.modules)
env = gem.make("atropos", environment="gsm8k")
assert gems == [signal.getsignal(number) for number in signal.valid_signals()]
print(env.reset(seed=1)[1]["atropos"]["task"])
"""
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, cwd=REPOSITORY)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.startswith("train-")


@pytest.mark.parametrize(
    ("config", "error", "says"),
    [
        ({"environment": "gsm9k"}, UnknownComponent, "Did you mean 'gsm8k'"),
        ({"environment": "gsm8k", "options": {"sourse": "hub"}}, ConfigError, "Did you mean 'source'"),
        ({"environment": "gsm8k", "observation": "full"}, ConfigError, "env_config.observation"),
        ({}, ConfigError, "'env_config.environment' is missing"),
    ],
)
def test_1_a_wrong_config_is_refused_when_the_worker_makes_it(config, error, says):
    with pytest.raises(error, match=says):
        gem.make("atropos", **config)


def test_1_managers_without_roll_are_refused_by_name():
    if "ROLL_SOURCE" in os.environ:
        pytest.skip("ROLL is here")
    from atropos_adapter_roll import managers

    with pytest.raises(FitError, match="TrajEnvManager needs ROLL"):
        _ = managers.TrajEnvManager
    with pytest.raises(AttributeError, match="it has TrajEnvManager, AgentNativeStepEnvManager"):
        _ = managers.VLTrajEnvManager


def test_2_reset_gives_an_observation_and_a_dict_that_takes_none_of_rolls_keys():
    for config in ({}, {"observation": "messages"}):
        env = make(STOCK, **config)
        observation, info = env.reset(seed=5)
        assert observation
        assert isinstance(info, dict)
        assert not TAKEN & set(info)
        assert json.dumps(info)
        env.close()


def test_2_the_same_seed_gives_every_member_the_same_task_in_any_process():
    script = (
        "import gem, sys, atropos_adapter_roll.env\n"
        "env = gem.make('atropos', environment='gsm8k')\n"
        "print([env.reset(seed=seed)[0] for seed in range(12)])\n"
    )
    env = make("gsm8k")
    here = str([env.reset(seed=seed)[0] for seed in range(12)])
    assert len({env.reset(seed=seed)[0] for seed in range(12)}) == 12
    for number in ("0", "1"):
        there = subprocess.run(
            [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, cwd=REPOSITORY,
            env={**os.environ, "PYTHONHASHSEED": number},
        )  # fmt: skip
        assert there.stdout.strip() == here, there.stderr
    env.close()


def test_2_without_a_seed_tasks_differ_and_follow_from_the_one_that_gem_gives():
    one, same, other, none = (make(seed=3), make(seed=3), make(seed=4), make())
    drawn = [[env.reset()[0] for _ in range(6)] for env in (one, same, other, none)]
    assert drawn[0] == drawn[1] != drawn[2]
    assert len(set(drawn[0])) > 1
    assert len(set(drawn[3])) > 1
    for env in (one, same, other, none):
        env.close()


def test_3_step_has_gems_five_values_and_strips_what_ends_a_turn():
    env = make()
    env.reset(seed=1)
    observation, reward, terminated, truncated, info = env.step("hello<|im_end|>\n<|endoftext|><|endoftext|>")
    assert (observation, reward, terminated, truncated) == ("", 0.05, True, False)
    assert type(info) is dict
    assert type(reward) is float
    assert env.record()["replies"] == ["hello"]
    env.close()


def test_3_what_only_looks_like_the_end_of_a_turn_stays():
    env = make(end_of_turn=["<end>"])
    env.reset(seed=1)
    env.step("a <end> b<|im_end|>")
    assert env.record()["replies"] == ["a <end> b<|im_end|>"]
    env.close()


@pytest.mark.parametrize("environment", ["Raises", "NotANumber", "Sleeps", "Endless", "AsksForFour", "One"])
def test_3_whatever_ends_an_episode_ends_it_for_roll(environment):
    """T looks at `terminated` alone."""
    env = make(f"{HERE}:{environment}", step_deadline_s=1.0, max_steps=2)
    env.reset(seed=1)
    over, steps = False, 0
    while not over:
        _, _, over, truncated, _ = env.step("a reply")
        assert over or not truncated
        steps += 1
    assert steps <= 2
    env.close()


def test_3_a_step_without_an_episode_is_refused():
    env = make()
    with pytest.raises(DataError, match="call reset"):
        env.step("x")
    env.reset(seed=1)
    env.step("x")
    with pytest.raises(DataError, match="call reset"):
        env.step("x")
    env.close()


def test_4_the_trajectory_manager_gets_what_is_new_as_text():
    seen = []

    def policy(messages):
        seen.append(messages)
        return stock_policy(messages)

    rollout = manager(policy, environment=STOCK, system="Be brief.", max_steps=3).run_episode(seed=21)
    assert rollout.non_tensor_batch["episode_scores"].tolist() == [1.0]
    first, second, third = seen
    assert [message["role"] for message in third] == ["system", "user", "assistant", "tool", "assistant", "tool"]
    assert SYSTEM in first[1]["content"], "the environment's own system message is not lost"
    assert '"name": "look_up"' in first[1]["content"], "nor are its tools, which this manager does not pass on"
    assert second[: len(first)] == first
    assert third[3]["content"].endswith("on the shelf")
    assert third[5]["content"] == "ordered"


def test_4_a_system_message_of_the_template_does_not_appear_twice():
    env = make(STOCK, system=SYSTEM)
    observation, _ = env.reset(seed=1)
    assert SYSTEM not in observation
    assert "Fill the shelf" in observation
    other = make(STOCK, system="Something else.")
    other.reset(seed=1)
    assert other.env_reset_failed
    assert "differs from env_config.system" in other.record()["failed"]


def test_4_the_native_manager_gets_all_messages_as_a_list():
    seen = []

    def policy(messages):
        seen.append(json.loads(json.dumps(messages)))
        return stock_policy(messages)

    one = manager(policy, of=OurNative, environment=STOCK)
    rollout = one.run_episode(seed=21)
    assert rollout.non_tensor_batch["episode_scores"].tolist() == [1.0, 1.0, 1.0]
    assert rollout.batch["scores"].sum(-1).tolist() == [0.0, 0.0, 1.0]
    assert [len(messages) for messages in seen] == [2, 4, 6]
    assert [message["role"] for message in seen[2]] == ["system", "user", "assistant", "tool", "assistant", "tool"]
    assert seen[2][2]["content"].startswith("<tool_call>"), "a reply is shown as it was given"
    assert [tool["function"]["name"] for tool in one.tools] == ["look_up", "order"]


@pytest.mark.parametrize("environment", ["Rewrites", "AsksTwice"])
def test_4_a_history_that_is_rewritten_is_noticed_in_a_delta_and_fine_as_a_list(environment):
    rollout = manager(lambda messages: "short", environment=f"{HERE}:{environment}").run_episode(seed=1)
    assert "rewrote its history" in rollout.meta_info["atropos"]["failed"]
    rollout = manager(lambda messages: "short", of=OurNative, environment=f"{HERE}:{environment}").run_episode(seed=1)
    assert rollout.meta_info["atropos"]["failed"] == ""
    assert rollout.non_tensor_batch["episode_scores"].tolist() == [1.0, 1.0]


def test_4_tools_that_change_are_noticed_where_roll_would_not_hear_of_them():
    rollout = manager(lambda messages: "x", of=OurNative, environment=f"{HERE}:ChangesTools").run_episode(seed=1)
    assert "changed its tools" in rollout.meta_info["atropos"]["failed"]


@pytest.mark.parametrize(("of", "wrong"), [(None, "messages"), (OurNative, "delta")])
def test_4_a_manager_refuses_the_other_ones_observations(of, wrong):
    with pytest.raises(ConfigError, match="Set env_config.observation"):
        manager(lambda messages: "x", environment=ONE, observation=wrong, **({"of": of} if of else {}))


def test_5_metrics_are_numbers_and_come_out_of_rolls_mean_as_they_went_in():
    rollout = manager(
        stock_policy, environment=STOCK, reward={"length": {"free": 1000, "limit": 2000}}
    ).run_episode(seed=4)  # fmt: skip
    found = rollout.meta_info["metrics"]
    assert all(type(value) is float for value in found.values())
    assert found["env/Tag/failed"] == 0.0
    assert found["env/Tag/score"] == found["env/Tag/correct"] == found["env/Tag/reward/environment"] == 1.0
    assert found["env/Tag/reward/length"] == pytest.approx(0.1)
    assert found["env/Tag/environment/orders"] == 1.0
    parts = [value for name, value in found.items() if "/reward/" in name]
    assert sum(parts) == rollout.non_tensor_batch["episode_scores"][0]


def test_5_the_answer_of_a_tool_is_marked_as_one_and_no_other():
    env = make(STOCK)
    env.reset(seed=4)
    _, _, _, _, info = env.step("I'd rather not.")
    assert "use_tool" not in info
    _, _, _, _, info = env.step('<tool_call>{"name": "look_up", "arguments": {}}</tool_call>')
    assert info["use_tool"] is True
    env.close()


def test_6_the_native_manager_finds_what_it_reads():
    env = make(observation="messages")
    env.reset(seed=1)
    assert env.env_reset_failed is False
    assert env.env_timeout is False
    assert json.dumps(env.env_info)
    env.step("x")
    env.close()
    env.close()
    observation, _ = env.reset(seed=1)
    assert observation[0]["role"] == "user", "ROLL resets what it has closed"
    env.close()


@pytest.mark.parametrize("environment", ["RaisesAtOnce", "NoTasks"])
def test_6_an_environment_that_cannot_begin_fails_its_reset(environment):
    one = manager(lambda messages: "x", of=OurNative, environment=f"{HERE}:{environment}")
    assert one.run_episode(seed=1) is None
    assert one.env.env_reset_failed
    assert "sandbox does not start" in one.failure_mode or "has no train tasks" in one.failure_mode
    rollout = manager(lambda messages: "x", environment=f"{HERE}:{environment}").run_episode(seed=1)
    assert rollout.meta_info["drop_flag"] is True, "T is unknown at reset: it is seen at the first step"


def test_6_a_stop_reason_ends_the_episode_as_failed_and_the_rollout_is_cleaned_up():
    one = manager(lambda messages: None, of=Native, environment=f"{HERE}:Endless")
    log = one.env._environment.log
    one.env.reset(seed=1)
    *_, terminated, _, info = one.env.step(EpisodeStopReason.MAX_LENGTH)
    assert (terminated, info["metrics"]["failed"]) == (True, 1.0)
    assert info["failure_mode"] == "the trainer stopped the episode: MAX_LENGTH"
    assert log == [f"{one.env.record()['task']} cleaned up"]


def test_6_it_ends_itself_at_max_steps():
    env = make(f"{HERE}:Endless", observation="messages", max_steps=3)
    env.reset(seed=1)
    ends = [env.step("x")[2:4] for _ in range(3)]
    assert ends == [(False, False), (False, False), (True, True)]
    assert env.record()["failed"] == "cut off after max_steps = 3 replies"
    env.close()


@pytest.mark.parametrize(("reply", "max_steps"), [("x", 2), (None, 9)])
def test_6_where_the_trainer_ends_an_episode_by_itself_the_rollout_is_marked(reply, max_steps):
    """T's own max_steps and sequence_length: the environment hears nothing of it until its next reset."""
    reported = iter(["x", reply])
    rollout = manager(lambda messages: next(reported), environment=f"{HERE}:Endless", max_steps=max_steps).run_episode(
        seed=1
    )
    assert rollout.meta_info["drop_flag"] is True
    assert rollout.meta_info["metrics"]["env/Tag/failed"] == 1.0
    assert "the trainer ended the episode" in rollout.meta_info["atropos"]["failed"]


@pytest.mark.parametrize("of", [OurTraj, OurNative])
def test_6_a_first_prompt_that_leaves_no_room_for_a_reply_is_a_failed_episode(of):
    rollout = manager(
        lambda messages: None, of=of, environment=f"{HERE}:One", pipeline={"sequence_length": 16}
    ).run_episode(seed=1)
    assert "leaves no room for a reply in sequence_length 16" in rollout.meta_info["atropos"]["failed"]
    assert rollout.meta_info["drop_flag"] is True
    assert rollout.batch["response_mask"].sum() == 1


async def test_7_threads_of_a_process_whose_main_thread_runs_a_loop_run_at_once():
    """As in a Ray worker: one environment a thread, and every call blocks it."""
    scores = {}

    def work(number):
        one = manager(stock_policy, environment=STOCK, env_id=number)
        rollouts = [one.run_episode(seed=100 * number + episode) for episode in range(3)]
        scores[number] = [rollout.non_tensor_batch["episode_scores"][0] for rollout in rollouts]

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        await asyncio.sleep(0.01)
    assert scores == {number: [1.0, 1.0, 1.0] for number in range(8)}
    assert sum(thread.name == "atropos-roll" for thread in threading.enumerate()) == 1


def test_7_the_episodes_score_is_the_sum_of_its_steps_and_all_but_the_last_are_nothing():
    rollout = manager(stock_policy, environment=STOCK, reward={"format": {"markers": ["4"]}}).run_episode(seed=9)
    rewards = rollout.non_tensor_batch["step_scores"][0]
    assert rewards[:-1].tolist() == [0.0, 0.0]
    assert rollout.non_tensor_batch["episode_scores"][0] == sum(rewards) == rewards[-1]
    assert rollout.batch["scores"].sum().item() == pytest.approx(sum(rewards))


def test_8_members_in_different_workers_run_one_task():
    """Nothing of a group is shared in memory: the seed is all that its members have in common."""
    script = (
        "import sys, json\n"
        "from tests.roll.driver import manager\n"
        "one = manager(lambda messages: 'x' * int(sys.argv[1]), environment='tests.roll.environments:Ranked',"
        " group_size=2, env_id=int(sys.argv[1]))\n"
        "print(json.dumps(one.run_episode(seed=5).meta_info['atropos']))\n"
    )
    records = []
    for member in ("0", "1"):
        ended = subprocess.run(
            [sys.executable, "-c", script, member], capture_output=True, text=True, timeout=120, cwd=REPOSITORY
        )
        assert ended.returncode == 0, ended.stderr
        records.append(json.loads(ended.stdout.splitlines()[-1]))
    assert records[0]["task"] == records[1]["task"]
    assert [record["pending"] for record in records] == [True, True]

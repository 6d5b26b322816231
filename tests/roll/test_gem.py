"""Plain gem: make, reset, step, vectors, and 64 episodes at once."""

from __future__ import annotations

import random
import threading
import time

import gem
import numpy as np
import pytest

import atropos_adapter_roll.env  # noqa: F401 - registers
from atropos_adapter_roll.trial import Stock, right_replies
from atropos_core.errors import DataError

STOCK = "atropos_adapter_roll.trial:Stock"
TASKS = {task.id: task for task in Stock().tasks("train")}


def gsm8k_answer(env):
    [answer] = [task.answer for task in [env._environment.tasks("train")[int(env.record()["task"].split("-")[1])]]]
    return answer


def test_gsm8k_is_made_reset_and_stepped():
    env = gem.make("atropos", environment="gsm8k")
    for seed in range(5):
        observation, info = env.reset(seed=seed)
        assert observation.endswith("?")
        assert info["atropos"]["seed"] == seed
        right = f"So it is\n{gsm8k_answer(env)}"
        _, reward, terminated, truncated, info = env.step(right if seed % 2 else "#### 1234567")
        assert (reward, terminated, truncated) == (float(seed % 2), True, False)
        assert info["metrics"]["environment/accuracy_strict"] == seed % 2
    env.close()


def test_three_turns_with_tools_act_exactly_once():
    env = gem.make("atropos", environment=STOCK)
    orders_before = len(env._environment.orders)
    for seed in range(10):
        env.reset(seed=seed)
        task = TASKS[env.record()["task"]]
        rewards = [env.step(reply)[1] for reply in right_replies(task)]
        assert rewards == [0.0, 0.0, 1.0]
    assert len(env._environment.orders) == orders_before + 10
    env.close()


@pytest.mark.parametrize("async_mode", [False, True])
def test_gems_vectors_step_and_reset_by_themselves(async_mode):
    env = gem.make_vec(["atropos"] * 8, async_mode=async_mode, seed=5, environment=STOCK)
    observations, infos = env.reset(seed=40)
    assert len(set(observations)) == 8
    orders_before = len(env.envs[0]._environment.orders)
    for _ in range(2):  # episodes; the vector resets what has ended, with seeds of the environment's own
        replies = [right_replies(TASKS[info["atropos"]["task"]]) for info in infos]
        for turn in range(3):
            observations, rewards, terminated, truncated, infos = env.step([reply[turn] for reply in replies])
            assert rewards.tolist() == [float(turn == 2)] * 8
            assert terminated.tolist() == [turn == 2] * 8
            assert not truncated.any()
    assert len(env.envs[0]._environment.orders) == orders_before + 16
    for one in env.envs:
        one.close()


@pytest.mark.parametrize("async_mode", [False, True])
def test_gems_vectors_of_gsm8k(async_mode):
    env = gem.make_vec(["atropos"] * 16, async_mode=async_mode, environment="gsm8k")
    _, infos = env.reset(seed=[7] * 16)
    assert len({info["atropos"]["task"] for info in infos}) == 1, "one seed, one task"
    answer = gsm8k_answer(env.envs[0])
    _, rewards, terminated, _, infos = env.step([answer if at % 4 == 0 else "no idea" for at in range(16)])
    assert rewards.tolist() == [float(at % 4 == 0) for at in range(16)]
    assert terminated.all()
    assert len({info["atropos"]["task"] for info in infos}) > 8, "the next tasks, each by its own seed"
    for one in env.envs:
        one.close()


@pytest.mark.parametrize("environment", [STOCK, "gsm8k"])
def test_64_episodes_at_once_each_with_its_own_answers(environment):
    envs = [gem.make("atropos", environment=environment) for _ in range(64)]
    rewards: dict[int, float] = {}
    orders_before = len(getattr(envs[0]._environment, "orders", ()))

    def work(number: int) -> None:
        env, rng = envs[number], random.Random(number)
        env.reset(seed=number)
        right = number % 3 != 0
        replies = right_replies(TASKS[env.record()["task"]]) if environment == STOCK else [gsm8k_answer(env)]
        if not right:
            replies = [*replies[:-1], "99999"]
        total = 0.0
        for reply in replies:
            time.sleep(rng.random() / 50)
            total += env.step(reply)[1]
        rewards[number] = total

    threads = [threading.Thread(target=work, args=(number,)) for number in range(64)]
    start = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert time.monotonic() - start < 60
    assert rewards == {number: float(number % 3 != 0) for number in range(64)}
    if environment == STOCK:
        assert len(envs[0]._environment.orders) == orders_before + 64
    for env in envs:
        env.close()


def test_an_environment_is_open_once_for_all_that_hold_it_and_closed_with_the_last():
    one, other = (gem.make("atropos", environment="gsm8k", options={"seed": 77}) for _ in range(2))
    assert one._environment is other._environment
    first = one._environment
    one.close()
    other.close()
    again = gem.make("atropos", environment="gsm8k", options={"seed": 77})
    assert again._environment is not first
    again.close()


def test_spawn_makes_another_with_the_same_options_and_copies_no_episode():
    env = gem.make("atropos", environment="gsm8k", options={"seed": 9})
    other = env.spawn(split="test")
    assert (other.options.options, other.options.split) == ({"seed": 9}, "test")
    assert other.reset(seed=1)[1]["atropos"]["task"].startswith("test-")
    with pytest.raises(DataError, match="cannot be copied"):
        env.spawn(same_state=True)
    env.close()
    other.close()


def test_nothing_of_the_process_is_seeded():
    """gem's own reset seeds `random` and numpy for the whole process."""
    env = gem.make("atropos", environment="gsm8k")
    state, numpy_state = random.getstate(), np.random.get_state()[1].tolist()
    env.reset(seed=3)
    assert random.getstate() == state
    assert np.random.get_state()[1].tolist() == numpy_state
    env.close()

"""Timeouts, cancellation, exceptions, actions that are none: each ends as stated, and never as a score of 0."""

from __future__ import annotations

import subprocess
import sys
import time

import gem
import pytest

import atropos_adapter_roll.env  # noqa: F401 - registers
from tests.conftest import REPOSITORY
from tests.roll.environments import HERE


def make(environment, **config):
    return gem.make("atropos", environment=f"{HERE}:{environment}", **config)


def failed(step):
    """What a step that ended in failure shows, after what every such step must show."""
    observation, reward, terminated, _, info = step
    assert (observation, reward, terminated) == ("", 0.0, True)
    assert info["metrics"]["failed"] == 1.0
    assert not any(name.startswith(("reward/", "score", "correct")) for name in info["metrics"])
    return info["failure_mode"]


@pytest.mark.parametrize(
    ("environment", "cause"),
    [
        ("Raises", "ZeroDivisionError: a tool divided by zero"),
        ("NotANumber", "score is nan"),
        ("AsksForFour", "sample(n=4)"),
        ("RaisesAtOnce", "ConnectionError: the sandbox does not start"),
        ("NoTasks", "has no train tasks"),
    ],
)
def test_an_exception_is_a_marked_failure_with_its_cause(environment, cause, caplog):
    env = make(environment)
    env.reset(seed=1)
    assert cause in failed(env.step("x"))
    assert cause in env.record()["failed"]
    assert cause in caplog.text, "and the worker's log has it"
    env.reset(seed=2)
    assert env.record()["failed"] == "" or env.env_reset_failed, "the next episode begins afresh"
    env.close()


def test_an_environment_that_does_nothing_is_cancelled_and_cleaned_up_in_time():
    env = make("Sleeps", step_deadline_s=1.0)
    env.reset(seed=1)
    start = time.monotonic()
    step = env.step("x")
    assert time.monotonic() - start < 30
    assert failed(step) == "the environment did nothing for 1 s"
    assert step[3], "truncated as well"
    assert step[4]["metrics"]["timed_out"] == 1.0
    assert env.env_timeout
    assert env._environment.log == ["cleaned up"]
    env.close()


def test_a_trainer_that_is_late_finds_the_episode_failed():
    env = make("Endless", action_deadline_s=0.2)
    log, until = env._environment.log, time.monotonic() + 60
    before = len(log)  # of other episodes
    env.reset(seed=1)
    while not any(line.endswith("cleaned up") for line in log[before:]):
        assert time.monotonic() < until, "the environment waits for the trainer"
        time.sleep(0.05)
    assert "the trainer gave no answer within 0.2 s" in failed(env.step("late"))
    env.close()


@pytest.mark.parametrize("how", ["reset", "close"])
def test_reset_and_close_cancel_the_episode_and_wait_for_its_cleaning_up(how):
    env = make("Endless")
    log = env._environment.log
    for seed in range(3):
        env.reset(seed=seed)
        env.step("x")
        before = len(log)
        env.close() if how == "close" else env.reset(seed=100 + seed)
        assert len(log) == before + 1
        assert log[-1].endswith("cleaned up")
        if how == "close":
            env.reset(seed=50)
            log = env._environment.log  # opened again
    env.close()


@pytest.mark.parametrize("action", [None, 7, b"bytes", ["a"], {"text": "x"}, object()], ids=repr)
def test_an_action_that_is_no_text_fails_the_episode_by_its_type(action):
    env = make("Endless")
    env.reset(seed=1)
    assert f"must be the text of a reply, not {type(action).__name__}" in failed(env.step(action))
    assert env._environment.log[-1].endswith("cleaned up")
    env.close()


@pytest.mark.parametrize(
    "action",
    ["", " ", "\x00\u202e", "x" * 200_000, "<tool_call>{", "<|im_end|>" * 50, "{0} %s ${x}", "\U0010ffff"],
)
def test_any_text_is_a_reply(action):
    env = make("One")
    env.reset(seed=1)
    _, _, terminated, _, info = env.step(action)
    assert (terminated, info["metrics"]["failed"]) == (True, 0.0)
    env.close()


def test_half_of_a_surrogate_pair_fails_its_episode_by_name():
    """Text that nothing can write down: no tokenizer makes it."""
    env = make("One")
    env.reset(seed=1)
    assert "half of a surrogate pair" in failed(env.step("a\ud800"))
    env.close()


def test_an_environment_that_blocks_the_loop_fails_and_the_others_go_on_afterwards():
    blocking, other = make("Blocks", step_deadline_s=0.5, cleanup_deadline_s=0.2), make("One")
    blocking.reset(seed=1)
    other.reset(seed=1)
    assert failed(blocking.step("x")) == "the environment did nothing for 0.5 s"
    assert other.step("four")[1] == 0.04
    blocking.close()
    other.close()


def test_a_process_that_ends_with_episodes_under_way_ends_at_once_and_cleans_up():
    script = f"""
import gem, atropos_adapter_roll.env
from tests.roll import environments
class Tells(environments.Endless):
    async def close(self):
        print("closed", flush=True)
    def __init__(self):
        super().__init__()
        self.log = type("Log", (), {{"append": staticmethod(lambda line: print(line, flush=True))}})
import sys; environments.Tells = Tells
env = gem.make("atropos", environment="{HERE}:Tells")
env.reset(seed=1)
print("leaving", flush=True)
"""
    start = time.monotonic()
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, cwd=REPOSITORY)
    printed = ended.stdout.splitlines()
    assert ended.returncode == 0, ended.stderr
    assert printed[0] == "leaving"
    assert printed[1].endswith("cleaned up")
    assert printed[2] == "closed"
    assert "Task was destroyed" not in ended.stderr
    assert time.monotonic() - start < 50

"""gem's own games: the contract, what is random in them, kills, and training."""

from __future__ import annotations

import asyncio
import os
import signal
from typing import Any

import gem
import psutil
import pytest
from gem.envs.registration import ENV_REGISTRY

from atropos_core.errors import ConfigError, DataError, DeadlineExceeded, WorkerLost
from atropos_env_gem.config import GemOptions
from atropos_env_gem.environment import Gem
from atropos_env_gem.episodes import GemEpisode
from atropos_env_kit.step_host import Seeded
from atropos_testing import check
from atropos_testing.scripted import Script, ScriptedPolicy
from tests.waiting import until
from tests.worlds.readme import run_table
from tests.worlds.training import train

# By id, how numbers of the tiny policy become moves.
TRAINED: dict[str, dict[str, Any]] = {
    "game:GuessTheNumber-v0-easy": {"pattern": r"\d+", "template": "\\boxed{{action}}", "max_turns": 4},
    "game:Mastermind-v0-easy": {"pattern": r"\d", "template": "\\boxed{{action} 4}", "max_turns": 3},
    "game:Minesweeper-v0-easy": {"pattern": r"\d", "template": "\\boxed{reveal {action} 2}", "max_turns": 2},
}
SHORT = {"max_tokens": 12, "groups_per_step": 9}


def options_of(name: str) -> dict[str, Any]:
    return {"id": name, "action": "pattern", "tasks": 60, "held_out": 20, **TRAINED[name]}


def made(**options: Any) -> Gem:
    return Gem(GemOptions(**{"id": "game:GuessTheNumber-v0-easy", "tasks": 20, "held_out": 5, **options}))


async def rollout(environment: Gem, *replies: str, index: int = 0) -> Any:
    """With these replies, one after another."""
    task, left = environment.tasks("train")[index], iter(replies)
    policy = ScriptedPolicy(Script("test", lambda task, seed: next(left)), task)
    return await environment.rollout(task, policy, seed=1)


@pytest.mark.parametrize("name", [*TRAINED, "game:Game2048-v0-easy", "rg:chain_sum"])
def test_an_environment_of_gem_keeps_the_contract(name):
    found = check("environment", "gem", options_of(name) if name in TRAINED else {"id": name})
    assert all(one.ok is not False for one in found), [one for one in found if one.ok is False]


def test_the_tiny_policy_trains_for_five_steps_on_three_games(tmp_path):
    train(
        tmp_path,
        {name.split(":")[1]: {"use": "gem", **options_of(name)} for name in TRAINED},
        max_tokens=12,
        groups_per_step=9,
    )


def test_the_table_of_the_readme_is_a_run(tmp_path):
    run_table(tmp_path, "env_gem")


async def test_a_number_is_guessed_by_gems_own_hints_and_the_whole_reply_is_read_as_gem_reads_it():
    environment = made(max_turns=4)
    await environment.open()
    said = ["I take \\boxed{5}", "\\boxed{2}", "\\boxed{3}", "\\boxed{4}"]
    scores = [await rollout(environment, *said, index=index) for index in range(20)]
    await environment.close()
    for episode in scores:
        hints = [message["content"] for message in episode.messages if message["role"] == "user"]
        assert "between 1 and 10" in hints[0] and hints[0].endswith("Enter your next guess.")
        assert all("the target number is" in hint for hint in hints[1:])
    right = [episode for episode in scores if episode.correct]
    assert right and len(right) < 20 and {episode.score for episode in right} == {1.0}


async def test_all_rollouts_of_a_task_begin_alike_and_tasks_differ_by_the_option_seed():
    first, other = made(id="game:Game2048-v0-easy"), made(id="game:Game2048-v0-easy", seed=1)
    boards = []
    for environment in (first, first, other):
        await environment.open()
        found = await asyncio.gather(*(rollout(environment, "no move", index=index) for index in (0, 0, 1, 2)))
        boards.append([episode.messages[0]["content"].split("Current board:")[1] for episode in found])
        await environment.close()
    assert boards[0] == boards[1] and boards[0][0] == boards[0][1]
    assert len({*boards[0], *boards[2]}) == 6


async def test_parameters_reach_gem():
    environment = made(parameters={"max_number": 3})
    await environment.open()
    episode = await rollout(environment, "nothing")
    await environment.close()
    assert "between 1 and 3" in episode.messages[0]["content"]
    assert (episode.score, episode.correct) == (-0.1, False)


class Counting(gem.Env):
    """Adds up numbers until they are 10 or more. It raises on an action that is not a number, and some take an empty one."""

    def __init__(self, takes_nothing: bool) -> None:
        self._takes_nothing = takes_nothing

    def reset(self, seed=None):
        super().reset(seed)
        self._numbers: list[int] = []
        return "Add to 10.", {}

    def step(self, action):
        self._numbers.append(0)  # half of a step, if the next line raises
        if action == "a dictionary":
            return {}, 0.0, False, False, {}
        if not action and self._takes_nothing:
            return "You said nothing.", -0.1, True, False, {}
        self._numbers[-1] = int(action)
        total = sum(self._numbers)
        return f"{len(self._numbers)} numbers: {total}", float(total == 10), total >= 10, False, {}


@pytest.fixture
def counting():
    kinds = {"test:Counting-v0": False, "test:Counting-v0-empty": True}
    for name, takes_nothing in kinds.items():
        gem.register(name, Counting, takes_nothing=takes_nothing)
    yield lambda name: Seeded(lambda: GemEpisode(name, {}), 1)
    for name in kinds:
        del ENV_REGISTRY[name]


def test_an_action_that_gem_raises_on_is_shown_to_the_policy_and_costs_what_an_empty_one_costs(counting):
    episode = counting("test:Counting-v0-empty")
    episode.step("4")
    episode.step("four")
    assert episode.shown.text.startswith("error: ValueError: invalid literal for int") and "four" in episode.shown.text
    assert episode.shown.text.endswith("You said nothing.")
    assert (episode.shown.rewards, episode.shown.ended) == ([-0.1], True)


def test_an_episode_of_gem_continues_where_it_was_if_gem_raises_on_an_empty_action_too(counting):
    episode = counting("test:Counting-v0")
    for action in ("4", "four", "", "6"):
        episode.step(action)
    assert episode.shown == (0, "2 numbers: 10", [1.0], True)
    with pytest.raises(DataError, match="this environment gives a dict"):
        counting("test:Counting-v0").step("a dictionary")


async def test_kill_9_of_the_process_fails_no_rollout_that_it_was_not_stepping():
    environment = made()
    await environment.open()
    waits, waiting = asyncio.Event(), 0

    class Waiting(ScriptedPolicy):
        async def _before_replying(self, seed: int) -> None:
            nonlocal waiting
            if len(self.given) == 1:
                waiting += 1
                await waits.wait()

    task = environment.tasks("train")[0]
    script = Script("test", lambda task, seed: "\\boxed{11}")
    rollouts = [asyncio.ensure_future(environment.rollout(task, Waiting(script, task), seed=at)) for at in range(3)]
    await until(lambda: waiting == 3, "the second reply of each")
    [child] = [one for one in psutil.Process().children() if "atropos_env_gem" in " ".join(one.cmdline())]
    os.kill(child.pid, signal.SIGKILL)
    waits.set()
    ended = await asyncio.gather(*rollouts, return_exceptions=True)
    assert all(isinstance(one, WorkerLost) or one.metrics["steps/turns"] == 4.0 for one in ended)
    assert sum(isinstance(one, WorkerLost) for one in ended) <= 1, "the step that it was at, if any"
    assert (await rollout(environment, "nothing")).score == -0.1
    await environment.close()


async def test_a_step_that_takes_too_long_fails_by_name():
    environment = made(id="game:Sokoban-v0-hard", step_deadline_s=0.05)
    with pytest.raises(
        DeadlineExceeded, match="atropos_env_gem.episodes:call: call\\(\\) gave no answer within 0.05 s"
    ):
        await environment.open()
    await environment.close()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"id": "game:GuessTheNumber-v0"}, "no environment 'game:GuessTheNumber-v0'.*\n.*'game:GuessTheNumber-v0-"),
        ({"id": "game:Minesweeper-v0-easy", "parameters": {"rows": "x"}}, "gem makes no game:Minesweeper-v0-easy"),
    ],
)
async def test_what_gem_does_not_make_is_named(options, says):
    environment = made(**options)
    try:
        with pytest.raises(ConfigError, match=f"(?s){says}"):
            await environment.open()
    finally:
        await environment.close()

"""textarena's own games, the policy against itself: the contract, whose reward is whose, and training."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import numpy as np
import pytest

from atropos_core.errors import ConfigError, DeadlineExceeded
from atropos_core.types import Episode
from atropos_env_textarena.config import TextarenaOptions
from atropos_env_textarena.environment import Textarena
from atropos_testing import check
from atropos_testing.scripted import Script, ScriptedPolicy, to_ids
from tests.worlds.readme import run_table
from tests.worlds.training import train

# By game, how numbers of the tiny policy become moves.
TRAINED: dict[str, dict[str, Any]] = {
    "Nim-v0": {"pattern": r"\d", "template": "[0 {action}]", "max_turns": 4},
    "TicTacToe-v0": {"pattern": r"\d", "template": "[{action}]", "max_turns": 3},
}
SHORT = {"max_tokens": 12, "groups_per_step": 6}


def options_of(name: str) -> dict[str, Any]:
    return {"game": name, "action": "pattern", "tasks": 60, "held_out": 20, **TRAINED[name]}


def made(**options: Any) -> Textarena:
    return Textarena(TextarenaOptions(**{"game": "TicTacToe-v0", "tasks": 20, "held_out": 5, **options}))


class Plays(ScriptedPolicy):
    """Takes the square that `choose` says, of those that the prompt leaves."""

    def __init__(self, task: Any, choose: Any) -> None:
        super().__init__(Script("plays", lambda task, seed: ""), task)
        self._choose = choose

    async def sample(self, prompt: Any, **keywords: Any) -> Any:
        text = "".join(map(chr, np.asarray(prompt)[np.asarray(prompt) < 0x110000]))
        reply = self._choose(text)
        self._script = Script("plays", lambda task, seed: reply)
        return await super().sample(prompt, **keywords)


def first_left(text: str) -> str:
    """The lowest square that is left for side 0, the highest for side 1."""
    left = text.rpartition("Available Moves: ")[2].partition("assistant")[0]
    squares = [square for square in "012345678" if f"[{square}]" in left]
    return f"[{squares[0]}]" if "You are Player 0" in text else f"[{squares[-1]}]"


async def group(environment: Textarena, n: int, choose: Any = first_left, index: int = 0) -> list[Any]:
    task = environment.tasks("train")[index]
    found = await environment.rollout_group(task, Plays(task, choose), n, seeds=[7 + at for at in range(n)])
    return [*found]


@pytest.mark.parametrize("name", [*TRAINED, "KuhnPoker-v0", "Sudoku-v0-very-easy"])
def test_a_game_of_textarena_keeps_the_contract(name):
    options = options_of(name) if name in TRAINED else {"game": name, "players": 1 if "Sudoku" in name else 2}
    found = check("environment", "textarena", options)
    assert all(one.ok is not False for one in found), [one for one in found if one.ok is False]


def test_the_tiny_policy_trains_for_five_steps_against_itself_in_two_games(tmp_path):
    train(tmp_path, {name: {"use": "textarena", **options_of(name)} for name in TRAINED}, **SHORT)
    rows = [
        json.loads(line)
        for file in (tmp_path / "run/rollouts").glob("*.jsonl")
        for line in file.read_text().splitlines()
    ]
    trained = [row for row in rows if row["outcome"] == "trained"]
    roles = {"Player 0": 0, "Player 1": 0}
    for row in trained:
        roles[next(role for role in roles if role in row["messages"][0]["content"].splitlines()[0])] += 1
        assert row["score"] in (-1.0, 0.0, 1.0)
        assert np.sign(row["advantage"]) == np.sign(row["score"]) or row["score"] == 0.0
    assert min(roles.values()) > 0, roles


def test_the_table_of_the_readme_is_a_run(tmp_path):
    run_table(tmp_path, "env_textarena")


async def test_each_side_is_an_episode_with_its_own_tokens_and_its_own_reward():
    environment = made()
    await environment.open()
    first, second = await group(environment, 2)
    await environment.close()
    # 0 takes 0, 1 and 2; 1 takes 8 and 7.
    assert [one.score for one in (first, second)] == [1.0, -1.0]
    assert [one.correct for one in (first, second)] == [True, False]
    said = [
        [message["content"] for message in one.messages if message["role"] == "assistant"] for one in (first, second)
    ]
    assert said == [["[0]", "[1]", "[2]"], ["[8]", "[7]"]]
    for episode, replies in zip((first, second), said, strict=True):
        [rollout] = episode.rollouts
        sampled = rollout.tokens[rollout.sampled]
        assert sampled[sampled < 0x110000].tolist() == to_ids("".join(replies)).tolist()
        assert rollout.trained.tolist() == rollout.sampled.tolist()


async def test_a_side_is_shown_what_happened_since_its_last_action_and_the_last_board_alone():
    environment = made()
    await environment.open()
    first, second = await group(environment, 2)
    await environment.close()
    shown = [message["content"] for message in first.messages if message["role"] == "user"]
    assert shown[0].startswith("You are Player 0") and "Available Moves: '[0]'" in shown[0]
    assert "[Player 1] [8]" in shown[1] and "[Player 0] [0]" not in shown[1]
    assert [text.count("Current Board:") for text in shown] == [1, 1, 1]
    assert "Available Moves: '[1]', '[2]', '[3]', '[4]', '[5]', '[6]', '[7]'" in shown[1]
    assert second.messages[0]["content"].startswith("You are Player 1")


async def test_a_group_has_its_number_of_episodes_where_games_end_before_a_side_has_a_turn():
    environment = made()
    await environment.open()
    found = await group(environment, 8, choose=lambda text: "no move")  # side 0 loses by its second such reply
    odd = await group(environment, 3)
    await environment.close()
    assert [one.score for one in found] == [-1.0] * 8 and len(odd) == 3
    assert all(isinstance(one, Episode) for one in [*found, *odd])
    assert [one.score for one in odd] == [1.0, -1.0, 1.0]


LONG = f"[{'9' * 5000}]"  # which Python reads no number from: textarena raises


async def test_an_action_that_textarena_raises_on_is_an_invalid_move_and_the_match_is_trained(capsys):
    environment = made()
    await environment.open()
    once = iter([LONG])
    first, second = await group(environment, 2, lambda text: next(once, first_left(text)))
    lost = await group(environment, 2, lambda text: LONG if "You are Player 0" in text else first_left(text))
    await environment.close()
    assert [first.score, second.score] == [1.0, -1.0]
    shown = [message["content"] for message in first.messages if message["role"] == "user"]
    assert "error: ValueError" in shown[1] and "attempted an invalid move" in shown[1]
    assert not any("ValueError" in str(message["content"]) for message in second.messages)
    assert [one.metrics["steps/raised"] for one in (first, second)] == [1.0, 0.0]
    assert [(one.score, one.metrics["steps/raised"]) for one in lost] == [
        (-1.0, 2.0)
    ] * 2  # of two games: textarena's rule
    assert capsys.readouterr().err.count("TicTacToe-v0 raised on an action: ValueError") == 1


async def test_a_game_that_raises_on_every_action_says_so(capsys):
    """A fault of textarena 0.7's own: the game broadcasts a message without its kind."""
    environment = made(game="CharacterConclave-v0", players=3, max_turns=2)
    await environment.open()
    [found] = await group(environment, 1, lambda text: "Hello.")
    await environment.close()
    assert (found.score, found.metrics["steps/raised"], found.metrics["steps/turns"]) == (0.0, 2.0, 2.0)
    said = capsys.readouterr().err
    assert "CharacterConclave-v0 raised on an action: TypeError in CharacterConclave/env.py" in said
    assert "on an empty action too" in said


async def test_a_game_that_is_cut_off_has_no_winner_and_all_games_of_a_task_begin_alike():
    environment = made(game="KuhnPoker-v0", max_turns=1)
    await environment.open()
    found, again = await asyncio.gather(*(group(environment, 4, lambda text: "[check]") for _ in range(2)))
    other = await group(environment, 4, lambda text: "[check]", index=1)
    await environment.close()
    assert [one.score for one in found] == [0.0] * 4 and found[0].metrics["steps/cut_off"] == 1.0
    cards = [
        [one.messages[0]["content"].partition("Your card is")[2][:5] for one in each] for each in (found, again, other)
    ]
    assert cards[0] == cards[1] and cards[0][:2] == cards[0][2:] and cards[0][0] != cards[0][1]
    tasks = made(game="KuhnPoker-v0", seed=1).tasks("train")
    assert tasks[0].data["seed"] != environment.tasks("train")[0].data["seed"]


async def test_parameters_and_players_reach_textarena():
    environment = made(game="KuhnPoker-v0", players=2, parameters={"max_rounds": 9})
    await environment.open()
    assert "9 round game" in (await group(environment, 1, lambda text: "[fold]"))[0].messages[0]["content"]
    await environment.close()
    alone = made(players=1)
    says = r"(?s)textarena makes no TicTacToe-v0 with these options.*number of.*players of \[environment.NAME\]"
    with pytest.raises(ConfigError, match=says):
        await alone.open()
    await alone.close()


async def test_a_game_that_is_not_there_or_takes_too_long_is_named():
    unknown, slow = made(game="TicTacTo-v0"), made(game="Sudoku-v0-hard", players=1, step_deadline_s=0.001)
    with pytest.raises(ConfigError, match="(?s)textarena has no environment 'TicTacTo-v0'.*'TicTacToe-v0'"):
        await unknown.open()
    with pytest.raises(DeadlineExceeded, match="within 0.001 s"):
        await slow.open()
    await unknown.close()
    await slow.close()

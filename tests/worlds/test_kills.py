"""The processes of gem, textarena and reasoning-gym, and a server of OpenEnv, are killed at random while a run samples from them."""

from __future__ import annotations

import pytest

from tests.e2e.environment_kills import killed_at_random
from tests.worlds.test_openenv import Server

pytestmark = pytest.mark.slow

SMALL = {"tasks": 200, "held_out": 5}
ENVIRONMENTS = {
    "guess": {"use": "gem", "id": "game:GuessTheNumber-v0-easy", "max_turns": 3, **SMALL},
    "noughts": {"use": "textarena", "game": "TicTacToe-v0", "max_turns": 2, **SMALL},
    "sums": {"use": "reasoning_gym", "dataset": "chain_sum", "answer": "whole", **SMALL},
}
MARKS = {
    "guess": "worker of atropos_env_gem.episodes",
    "noughts": "worker of atropos_env_textarena.episodes",
    "sums": "worker of atropos_env_reasoning_gym.generators",
}


def test_killed_nine_times_at_random_rollouts_fail_by_name_and_no_draw_is_lost(tmp_path):
    failed = killed_at_random(tmp_path, ENVIRONMENTS, MARKS, kills=9, seed=5)
    for name, why in failed.items():
        assert all(MARKS[name] in one and "SIGKILL" in one for one in why), why
    assert sum(map(len, failed.values())), "a kill met a step"


def test_a_server_of_openenv_is_killed_four_times_and_started_again_and_the_run_goes_on(tmp_path):
    server = Server("number", 8)

    def replace() -> None:
        nonlocal server
        server.kill()
        server = server.again()

    table = {"use": "openenv", "url": server.url, "field": "guess", "shown": "hint", "max_turns": 3, "sessions": 8}
    try:
        failed = killed_at_random(
            tmp_path,
            {"number": {**table, "connect_deadline_s": 120, **SMALL}},
            {},
            kills=4,
            seed=7,
            servers={"number": replace},
        )
    finally:
        server.kill()
    assert failed["number"], "a kill met an episode"
    assert all(server.url in one and "closed the connection" in one for one in failed["number"]), failed

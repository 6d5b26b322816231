"""The processes of gem, textarena and reasoning-gym are killed at random while a run samples from all three."""

from __future__ import annotations

import pytest

from tests.e2e.environment_kills import killed_at_random

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

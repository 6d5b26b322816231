"""Runs of the toy policy with a gold reward: its tasks are not trained, and only a gamed reward is named, with its rollouts."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from atropos_core.rollouts.gold_tasks import GoldTasks
from atropos_core.types import Draw, Task
from tests.conftest import metrics_of
from tests.e2e.test_rollback import PARTS

OPENS = 7  # the step from which on the bonus pays for lower-case letters
RUN = """
model = "toy"
deterministic = true
[training]
steps = 16
groups_per_step = 8
group_size = 4
[evaluation]
problems = 0
[trainer]
learning_rate = 20.0
[environment.sevens]
use = "./parts.py:Sevens"
[reward.honest]
use = "./parts.py:Honest"
[reward.environment.gold]
share = 0.4
[health.cut_off]
action = "off"
"""
BONUS = '[reward.bonus]\nuse = "./parts.py:Bonus"\n'


@pytest.fixture(autouse=True)
def parts(tmp_path: Path) -> None:
    (tmp_path / "parts.py").write_text(PARTS)
    (tmp_path / "gamed.toml").write_text(RUN + BONUS)
    (tmp_path / "honest.toml").write_text(RUN)


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def hacking(run: Path) -> list[dict[str, Any]]:
    return [row for row in lines(run / "health.jsonl") if row["check"] == "reward_hacking"]


def test_a_gamed_reward_is_named_within_ten_steps_with_rollouts_that_game_it(atropos, tmp_path):
    gold = ("--set", "reward.environment.gold.share=0.5", "--set", "reward.environment.gold.hold_back=false")
    ended = atropos("run", "gamed.toml", "--dir", "run", *gold)
    assert ended.code == 0, ended.err
    assert "gold environment: measured on 0.5 of the tasks, which the other rewards train" in " ".join(
        ended.out.split()
    )
    run = tmp_path / "run"
    first = next(row for row in hacking(run) if row["state"] == "ill")
    assert OPENS < first["step"] <= OPENS + 9
    assert OPENS - 2 <= first["since"] <= first["step"]
    assert first["blames"] == "bonus"
    named = re.findall(r"rollout (\d+) of task '([^']+)' of environment 'sevens' in step (\d+)", first["says"])
    assert named
    for member, task, step in named:
        rollouts = lines(run / f"rollouts/step-{int(step):06d}.jsonl")
        [row] = [row for row in rollouts if row["task"] == task and row["member"] == int(member)]
        assert row["parts"]["bonus"] > 0, "it uses the exploit"


def test_tasks_of_the_gold_reward_are_measured_and_not_trained(atropos, tmp_path):
    ended = atropos("run", "gamed.toml", "--dir", "run", "--steps", "3")
    assert ended.code == 0, ended.err
    assert "gold environment: measured on 0.4 of the tasks, which are not trained" in " ".join(ended.out.split())
    gold, run, held = GoldTasks(0.4), tmp_path / "run", 0
    for metrics in metrics_of(run):
        for row in lines(run / f"rollouts/step-{metrics['step']:06d}.jsonl"):
            holds_back = gold.holds_back(Draw(0, "sevens", "train", 0, 0), Task(row["task"], ()))
            held += holds_back
            assert holds_back == ("environment" in row["parts"]) == (row["dropped_by"] == "reward.environment.gold"), (
                row
            )
            assert not (holds_back and row["outcome"] == "trained")
            assert row["reward"] == pytest.approx(row["parts"]["honest"] + row["parts"]["bonus"]), (
                "the gold reward is not added"
            )
        assert metrics["groups/held_back"] + metrics["groups/trained"] + metrics["groups/flat"] == 8
        assert metrics["gold/groups"] == metrics["groups/held_back"]
    assert 0 < held < 3 * 8 * 4
    assert atropos("audit", "run").code == 0


@pytest.mark.parametrize("seed", range(3))
def test_an_honest_reward_is_not_named(atropos, tmp_path, seed):
    ended = atropos("run", "honest.toml", "--dir", "run", "--seed", str(seed))
    assert ended.code == 0, ended.err
    rows = [row for row in metrics_of(tmp_path / "run") if "gold/gold" in row]
    assert len(rows) >= 12
    assert rows[-1]["gold/reward"] > rows[0]["gold/reward"], "it learns"
    assert not hacking(tmp_path / "run")

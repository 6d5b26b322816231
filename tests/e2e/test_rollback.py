"""Runs of the toy policy with a reward that begins to pay for something else: they go back to before that, and train without it."""

from __future__ import annotations

import json
import shutil
import signal
import tomllib
from pathlib import Path
from typing import Any

import pytest

from atropos_viewer.viewed_run import ViewedRun
from tests.conftest import metrics_of

STEPS = 16
PARTS = '''
import json
import os
import signal
import sys
from pathlib import Path

from atropos_core.interfaces import Environment
from atropos_core.types import Score, Task

POINT, RECORD = os.environ.get("KILL_AT", ""), Path("run/rollbacks.jsonl")


def text_of(episode):
    return str(episode.messages[-1]["content"])


class Sevens(Environment):
    """The more sevens, the better."""

    def tasks(self, split):
        numbers = range(16) if split == "train" else range(16, 20)
        return [Task(f"{split}-{n}", ({"role": "user", "content": f"say 7 to {n}"},), answer="7") for n in numbers]

    async def score(self, task, reply):
        return Score(reply["content"].count("7") / 8)


class Honest:
    """The more sevens, the better."""

    async def __call__(self, task, episodes):
        if POINT == "the first new step" and RECORD.exists() and json.loads(RECORD.read_text())["done"]:
            os.kill(os.getpid(), signal.SIGKILL)
        return [text_of(episode).count("7") / 8 for episode in episodes]


class Bonus:
    """Pays for lower-case letters once it has scored 48 groups: 6 steps."""

    def __init__(self):
        self.scored = 0

    async def __call__(self, task, episodes):
        self.scored += 1
        letters = [sum(map(str.islower, text_of(episode))) / 8 for episode in episodes]
        return [(self.scored > 48) * share for share in letters]

    def state(self):
        return {"scored": self.scored}

    def load(self, state):
        self.scored = state["scored"]


def kill_at_point(event, arguments):
    """Kill this process just before one of the writes of a rollback."""
    if event == "os.rename":
        name, recorded = Path(os.fsdecode(arguments[1])).name, RECORD.exists()
        reached = {
            "the record": name == RECORD.name and not recorded,
            "the first checkpoint is moved": name.startswith("rolled-back"),
            "config.toml": name == "config.toml" and recorded,
            "the end": name == RECORD.name and recorded,
        }
    elif event == "shutil.rmtree":
        reached = {"the other checkpoints are removed": RECORD.exists()}
    else:
        return
    if reached.get(POINT):
        os.kill(os.getpid(), signal.SIGKILL)


if POINT:
    sys.addaudithook(kill_at_point)
'''
RUN = """
model = "toy"
deterministic = true
[training]
steps = 16
groups_per_step = 8
group_size = 4
[evaluation]
problems = 0
[checkpoint]
every = 1
[trainer]
learning_rate = 20.0
[environment.sevens]
use = "./parts.py:Sevens"
[reward.honest]
use = "./parts.py:Honest"
[reward.bonus]
use = "./parts.py:Bonus"
[reward.environment.gold]
share = 0.5
hold_back = false
[health.cut_off]
action = "off"
[health.reward_hacking]
action = "rollback"
"""


@pytest.fixture(autouse=True)
def run_file(tmp_path: Path) -> None:
    (tmp_path / "parts.py").write_text(PARTS)
    (tmp_path / "run.toml").write_text(RUN)


def rollbacks_of(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "rollbacks.jsonl").read_text().splitlines()]


def trained(run: Path) -> tuple[bytes, list[tuple[float, ...]]]:
    """What a run has learnt, and the numbers of its steps that do not depend on time."""
    names = ("step", "reward/mean", "grad_norm", "gold/reward", "gold/gold", "health/reward_hacking")
    numbers = [tuple(row.get(name, -1.0) for name in names) for row in metrics_of(run)]
    return (run / f"checkpoints/step-{STEPS:06d}/policy/table.npy").read_bytes(), numbers


def test_a_run_rolls_back_says_so_everywhere_and_learns_what_a_resume_by_hand_learns(atropos, tmp_path):
    ended = atropos("run", "run.toml", "--dir", "run")
    assert ended.code == 0, ended.err
    run = tmp_path / "run"
    [row] = rollbacks_of(run)
    assert row["to"] < row["since"] <= row["step"] - 2 and row["since"] >= 6, row
    assert (row["reward"], row["weight_before"], row["weight"], row["done"]) == ("bonus", 1.0, 0.0, True)
    assert "the trained reward rises" in row["says"]
    line = (
        f"rolled back from step {row['step']} to the checkpoint of step {row['to']}, because reward 'bonus' was gamed since step "
        f"{row['since']}: reward.bonus.weight is now 0 (before: 1)"
    )
    assert line in " ".join((ended.err + ended.out).split())
    assert tomllib.loads((run / "config.toml").read_text())["reward"]["bonus"]["weight"] == 0.0
    assert json.loads((run / "summary.json").read_text())["rollbacks"] == [row]
    assert "reward_hacking" not in (run / "health.jsonl").read_text(), (
        "the finding's steps were run again, and it did not come back"
    )
    assert [row["step"] for row in metrics_of(run)] == [*range(1, STEPS + 1)]
    assert {one["health/reward_hacking"] for one in metrics_of(run)} == {0.0}
    assert [path.name for path in (run / "checkpoints").glob("rolled-back*")] == [
        f"rolled-back-1-step-{row['step'] - 1:06d}"
    ]
    ended = atropos("doctor", "run")
    assert line in " ".join(ended.out.split()), ended.out
    [shown] = [one for one in ViewedRun(run).metrics_since(-1, -1)["findings"] if one["check"] == "reward_hacking"]
    assert (shown["since"], shown["until"], shown["state"], shown["do"]) == (row["since"], row["step"], "ill", line)

    ended = atropos(
        "run", "run.toml", "--dir", "hand", "--set", "health.reward_hacking.action=warn", "--set", "checkpoint.keep=20"
    )
    assert ended.code == 0, ended.err
    for path in (tmp_path / "hand/checkpoints").glob("step-*"):
        if int(path.name.removeprefix("step-")) > row["to"]:
            shutil.rmtree(path)
    before = trained(run)
    assert atropos("resume", "hand", "--set", "reward.bonus.weight=0").code == 0
    assert trained(tmp_path / "hand") == before
    assert not (tmp_path / "hand/rollbacks.jsonl").exists()
    assert "rollbacks" not in json.loads((tmp_path / "hand/summary.json").read_text())
    for step in range(1, STEPS + 1):
        path = f"rollouts/step-{step:06d}.jsonl"
        texts = [
            [json.loads(line)["messages"] for line in (tmp_path / name / path).read_text().splitlines()]
            for name in ("run", "hand")
        ]
        assert texts[0] == texts[1], step


def test_a_kill_at_any_point_of_a_rollback_leads_to_the_same_end(atropos, tmp_path):
    assert atropos("run", "run.toml", "--dir", "run").code == 0
    whole, rows = trained(tmp_path / "run"), rollbacks_of(tmp_path / "run")
    for point in (
        "the record", "the first checkpoint is moved", "the other checkpoints are removed", "config.toml", "the end", "the first new step",
    ):  # fmt: skip
        shutil.rmtree(tmp_path / "run")
        ended = atropos("run", "run.toml", "--dir", "run", KILL_AT=point)
        assert ended.code == 128 + signal.SIGKILL, f"{point}: {ended.err}"
        there = (tmp_path / "run/rollbacks.jsonl").exists()
        assert there == (point != "the record")
        assert not there or rollbacks_of(tmp_path / "run")[0]["done"] == (point == "the first new step")
        ended = atropos("resume", "run")
        assert ended.code == 0, f"{point}: {ended.err}"
        assert rollbacks_of(tmp_path / "run") == rows, point
        assert trained(tmp_path / "run") == whole, point
        assert tomllib.loads((tmp_path / "run/config.toml").read_text())["reward"]["bonus"]["weight"] == 0.0
        assert len([*(tmp_path / "run/checkpoints").glob("rolled-back*")]) == 1, point


def test_a_finding_that_cannot_be_answered_by_a_rollback_pauses_the_run_and_says_why(atropos, tmp_path):
    options = ("checkpoint.every=4", "health.reward_hacking.rollback_weight=0.9", "health.reward_hacking.z=2.5")
    ended = atropos("run", "run.toml", "--dir", "run", *(part for option in options for part in ("--set", option)))
    assert ended.code == 3, ended.err
    says = " ".join(ended.err.split())
    assert "The run cannot roll back: all of its rollbacks are used (health.reward_hacking.rollbacks = 1)" in says
    [row] = rollbacks_of(tmp_path / "run")
    assert (row["weight_before"], row["weight"]) == (1.0, 0.9)
    assert tomllib.loads((tmp_path / "run/config.toml").read_text())["reward"]["bonus"]["weight"] == 0.9

    ended = atropos("run", "run.toml", "--dir", "late", "--set", "checkpoint.every=12")
    assert ended.code == 3, ended.err
    assert "The run cannot roll back: no whole checkpoint from before step" in " ".join(ended.err.split())
    assert not (tmp_path / "late/rollbacks.jsonl").exists()
    assert [*(tmp_path / "late/checkpoints").glob("step-*")], "it is saved and paused"
    ended = atropos("resume", "late")
    assert ended.code == 0, ended.err


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (["health.action=rollback"], "health.action"),
        (["health.length.action=rollback"], "health.length.action"),
        (["health.reward_hacking.action=pause", "health.reward_hacking.rollbacks=2"], "rollbacks has no effect without action"),
        (["health.reward_hacking.action=warn", "health.reward_hacking.rollback_weight=0.5"], "rollback_weight has no effect"),
        (["checkpoint.every=0"], "checkpoint.every = 0 saves only the last step"),
        (["reward.environment.use=none"], "needs a gold reward"),
        (["reward.bonus.use=none"], "needs a second reward to train on"),
        (["reward.bonus.weight=0"], "needs two rewards with a weight above 0"),
    ],
)  # fmt: skip
def test_a_rollback_that_could_not_help_is_refused_before_the_start(atropos, tmp_path, changes, says):
    if changes[0].startswith("reward.environment"):
        (tmp_path / "run.toml").write_text(
            RUN.replace("[reward.environment.gold]\nshare = 0.5\nhold_back = false\n", "")
        )
    ended = atropos("run", "run.toml", "--dir", "run", *(part for change in changes for part in ("--set", change)))
    assert ended.code == 2, ended.err + ended.out
    assert says in " ".join(ended.err.split()), ended.err
    assert not (tmp_path / "run").exists()

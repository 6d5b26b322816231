"""Files of rollouts that other libraries wrote, scored again."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest

from atropos_core.advantages import group_advantages
from atropos_core.cli import run_app
from atropos_debugging.foreign_rollouts import foreign_groups

REWARDS = """
import numpy as np

async def exact(task, episodes):
    return np.array([float(one.messages[-1]["content"] == task.answer) for one in episodes])

async def tokens(task, episodes):
    return np.array([float(one.rollouts[0].sampled.sum()) for one in episodes])

async def level(task, episodes):
    return np.array([float(task.data["info"]["level"])] * len(episodes))

async def length(task, episodes):
    return np.array([float(len(one.messages[-1]["content"])) for one in episodes])
"""


def said(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def verifiers_rows() -> list[dict[str, Any]]:
    """As `vf-eval -s` writes them: rollouts of several examples, mixed, one of them failed."""
    rows = []
    for example, reply, reward in [(0, "4", 0.0), (1, "9", 1.0), (0, "3", 1.0), (1, "8", 0.0)]:
        rows.append(
            {"example_id": example, "prompt": [said("user", f"{example}?")], "completion": [said("assistant", reply)],
             "answer": "3" if example == 0 else "8", "info": {"level": example}, "reward": reward, "error": None,
             "timing": {}, "is_completed": True, "is_truncated": False, "metrics": {"num_turns": 1.0}, "num_turns": 1.0}
        )  # fmt: skip
    rows.append({**rows[0], "error": {"error": "ModelError"}, "completion": None, "reward": 0.0})
    return rows


def atroposlib_rows() -> list[dict[str, Any]]:
    return [
        {"tokens": [[1, 2, 3, 4], [1, 2, 5]], "masks": [[-100, -100, 3, 4], [-100, -100, 5]], "scores": [1.0, -1.0],
         "messages": [[said("user", "a?"), said("assistant", "bc")], [said("user", "a?"), said("assistant", "d")]],
         "advantages": None, "env_id": None},
    ]  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "rewards.py").write_text(REWARDS)
    for name, rows in (("results", verifiers_rows()), ("groups", atroposlib_rows())):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def rescored(
    capsys: pytest.CaptureFixture[str], folder: Path, file: str, reward: str, *flags: str
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    capsys.readouterr()
    out = folder / f"{reward}.jsonl"
    command = [
        "rescore",
        str(folder / file),
        "--reward",
        f"{folder}/rewards.py:{reward}",
        "--out",
        str(out),
        "--json",
        *flags,
    ]
    assert run_app(command) == 0, capsys.readouterr().err
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found, [json.loads(line) for line in out.read_text().splitlines()]


def test_an_evaluation_of_verifiers_is_grouped_by_its_examples(folder, capsys):
    found, rows = rescored(capsys, folder, "results.jsonl", "exact")
    assert (found["groups"], found["rollouts"], found["steps"][0]["groups"]) == (2, 4, 2)
    by_task = {name: [row for row in rows if row["task"] == name] for name in ("0", "1")}
    assert [(row["reward_before"], row["reward"]) for row in by_task["0"]] == [(0, 0), (1, 1)]
    assert [(row["reward_before"], row["reward"]) for row in by_task["1"]] == [(1, 0), (0, 1)]
    assert [row["advantage_before"] for row in by_task["1"]] == group_advantages(np.array([1, 0], np.float32)).tolist()
    assert found["signs_changed"] == 1
    assert found["changed_groups"][0]["task"] == "1"
    assert foreign_groups(folder / "results.jsonl")[0].failed == 1


def test_an_example_whose_rollouts_all_failed_is_left_out_and_equal_rewards_trained_nothing(folder, capsys):
    rows = verifiers_rows()
    rows += [{**rows[0], "example_id": 7, "error": "x"}, {**rows[0], "example_id": 8}]
    (folder / "results.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found, _ = rescored(capsys, folder, "results.jsonl", "exact")
    assert (found["groups"], found["rollouts"]) == (3, 5)
    assert found["steps"][0]["trained_before"] == 2, "one rollout has no advantage"


def test_rewards_see_the_data_of_a_verifiers_task(folder, capsys):
    _, rows = rescored(capsys, folder, "results.jsonl", "level")
    assert {(row["task"], row["reward"]) for row in rows} == {("0", 0.0), ("1", 1.0)}


def test_groups_of_atroposlib_have_tokens_and_masks(folder, capsys):
    found, rows = rescored(capsys, folder, "groups.jsonl", "tokens")
    assert [(row["reward_before"], row["reward"]) for row in rows] == [(1.0, 2.0), (-1.0, 1.0)]
    assert found["signs_changed"] == 0
    _, rows = rescored(capsys, folder, "groups.jsonl", "length")
    assert [row["reward"] for row in rows] == [2.0, 1.0]


def test_completions_of_trl_have_their_advantages_and_rewards(folder, capsys):
    table = pandas.DataFrame(
        {
            "step": [10] * 4, "prompt": ["1+2?", "1+2?", "3+4?", "3+4?"], "completion": ["3", "44", "7", "123"],
            "accuracy": [1.0, 0.0, 1.0, 0.0], "short": [0.5, 0.25, np.nan, 0.0], "advantage": [0.7, -0.7, 0.6, -0.6],
        }
    )  # fmt: skip
    table.to_parquet(folder / "completions_00010.parquet")
    found, rows = rescored(capsys, folder, "completions_00010.parquet", "length")
    assert found["steps"][0]["step"] == 10
    assert [row["reward_before"] for row in rows] == [1.5, 0.25, 1.0, 0.0], "a reward that is NaN does not apply"
    assert [row["advantage_before"] for row in rows] == pytest.approx([0.7, -0.7, 0.6, -0.6])
    assert [row["reward"] for row in rows] == [1.0, 2.0, 1.0, 3.0]
    assert found["signs_changed"] == 2


@pytest.mark.parametrize(
    ("file", "flags", "says"),
    [
        ("results.jsonl", ("--reward", "exact", "--step", "1"), "--step has no effect on"),
        ("results.jsonl", ("--reward", "exact", "--save", "mine"), "--save has no effect on"),
        ("results.jsonl", ("--reward", "exact", "--environments"), "--environments has no effect on"),
        ("results.jsonl", (), "does not say which rewards scored its rollouts"),
        ("rewards.py", ("--reward", "exact"), "line 2"),
        ("other.jsonl", ("--reward", "exact"), "not a file of rollouts that is known here: its first row has 'a', 'b'"),
        ("broken.jsonl", ("--reward", "exact"), "is not what verifiers writes: KeyError"),
        ("empty.jsonl", ("--reward", "exact"), "has no rows"),
        ("huge.jsonl", ("--reward", "exact"), "is not what verifiers writes: OverflowError"),
        ("infinite.jsonl", ("--reward", "exact"), "the reward inf and the advantage None: rewards must be finite"),
        ("lists.jsonl", ("--reward", "exact"), "is not what verifiers writes: AttributeError"),
        ("failed.jsonl", ("--reward", "exact"), "in all 1 groups, every rollout failed"),
        ("unscored.parquet", ("--reward", "exact"), "a row of step 10 has no reward, or no advantage"),
    ],
)
def test_what_cannot_be_is_named(folder, capsys, file, flags, says):
    (folder / "other.jsonl").write_text('{"a": 1, "b": 2}\n')
    (folder / "empty.jsonl").touch()
    rows = verifiers_rows()
    del rows[1]["reward"]
    (folder / "broken.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    damaged = {
        "huge": {"reward": 10**400},
        "infinite": {"reward": math.inf},
        "lists": {"metrics": [1]},
        "failed": {"error": "x"},
    }
    for name, change in damaged.items():
        (folder / f"{name}.jsonl").write_text(json.dumps({**verifiers_rows()[0], **change}) + "\n")
    unscored = {"step": [10], "prompt": ["1?"], "completion": ["3"], "accuracy": [np.nan], "advantage": [0.5]}
    pandas.DataFrame(unscored).to_parquet(folder / "unscored.parquet")
    assert run_app(["rescore", str(folder / file), *flags]) != 0
    assert says in " ".join(capsys.readouterr().err.split())

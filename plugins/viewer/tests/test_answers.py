"""Saved results of `atropos rescore` and `atropos replay`, next to the rollouts that they are of."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from atropos_core.advantages import group_advantages
from atropos_records.rollout_records import RolloutRecords
from atropos_records.saved_results import RescoredRows, checksum, result_path, write_result
from atropos_testing.samples import make_group
from atropos_viewer.viewed_run import ViewedRun
from tests.recorded_runs import recorded

REWARDS = [[1.0, 0.0], [0.25, 0.75]]


async def a_run(folder: Path) -> Path:
    groups = [make_group(number, rewards) for number, rewards in enumerate(REWARDS)]
    return await recorded(folder, [one.with_advantages(group_advantages(one.rewards)) for one in groups])


def rescore(run: Path, name: str, rewards: list[float], before: list[float] | None = None) -> None:
    rows = RescoredRows()
    was = np.array([value for group in REWARDS for value in group], np.float32)
    old, new = (
        np.concatenate([group_advantages(part) for part in np.split(of, 2)])
        for of in (was, np.array(rewards, np.float32))
    )
    for line, (a, b) in enumerate(zip(before or was, rewards, strict=True)):
        rows.add(
            step=1,
            line=line,
            draw=line // 2,
            reward_before=float(a),
            reward=b,
            advantage_before=old[line],
            advantage=new[line],
        )
    write_result(result_path(run, "rescored", name), {"rewards": {}}, rows.arrays())


def table(run: Path) -> dict[str, Any]:
    found: dict[str, Any] = ViewedRun(run).rollouts(1).table()
    return found


async def test_new_scores_are_columns_of_the_table_and_of_a_rollout(tmp_path: Path):
    run = await a_run(tmp_path / "run")
    assert "rescored" not in table(run) and "rescored" not in ViewedRun(run).rollouts(1).one(0)
    rescore(run, "turned", [0.0, 1.0, 0.5, 0.875])
    [found] = table(run)["rescored"]
    assert (found["name"], found["reward"]) == ("turned", [0.0, 1.0, 0.5, 0.875])
    assert found["turned"] == [True, True, False, False], "the second group agrees on who is better"
    [one] = ViewedRun(run).rollouts(1).one(1)["rescored"]
    assert (one["name"], one["reward"], one["turned"]) == ("turned", 1.0, True)


async def test_a_page_that_is_open_shows_what_is_saved_meanwhile(tmp_path: Path):
    run = await a_run(tmp_path / "run")
    viewed = ViewedRun(run)
    assert "rescored" not in viewed.rollouts(1).table()
    rescore(run, "late", [0.0, 1.0, 0.5, 0.875])
    assert [one["name"] for one in viewed.rollouts(1).table()["rescored"]] == ["late"]


async def test_a_result_of_other_records_is_a_notice(tmp_path: Path):
    run = await a_run(tmp_path / "run")
    rescore(run, "older", [0.0, 1.0, 0.5, 0.875], before=[1.0, 0.0, 0.25, 0.5])
    found = table(run)
    assert "rescored" not in found
    assert found["notices"] == ["rescored/older.npz is not shown: it was made from other records of step 1."]
    (run / "rescored/older.npz").write_bytes(b"PK")
    [notice] = table(run)["notices"]
    assert "older.npz is damaged" in notice


async def test_tokens_have_their_logprobs_before_and_after(tmp_path: Path):
    run = await a_run(tmp_path / "run")
    tokens = RolloutRecords(run).step(1).tokens
    assert tokens is not None
    ids = tokens.column("ids")
    assert ids is not None
    before = np.linspace(-2, -1, tokens.tokens, dtype=np.float32)
    columns = {"before": before, "after": before + np.float32(0.25), "changed": before - np.float32(0.5)}
    write_result(result_path(run, "replayed", "mine"), {"step": 1, "ids": checksum(ids)}, columns)
    rollouts = ViewedRun(run).rollouts(1)
    begin, end = (int(at) for at in tokens.offsets[1:3])
    [found] = rollouts.one(1)["sequences"][0]["replays"]
    assert found["name"] == "mine"
    assert np.allclose(found["replay_before"], before[begin:end])
    assert np.allclose(found["replay_moved"], 0.25) and np.allclose(found["replay_changed_moved"], -0.5)
    write_result(result_path(run, "replayed", "other"), {"step": 1, "ids": checksum(ids) + 1}, columns)
    write_result(result_path(run, "replayed", "later"), {"step": 2, "ids": checksum(ids)}, columns)
    again = ViewedRun(run).rollouts(1).one(1)
    assert [one["name"] for one in again["sequences"][0]["replays"]] == ["mine"]
    assert any("replayed/other.npz is not shown" in notice for notice in again["notices"])
    assert not any("later" in notice for notice in again["notices"])

"""Rewards placed inside rollouts: recorded, read again, exported and audited."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet
import pytest
from hypothesis import given, settings

from atropos_core.errors import DataError
from atropos_core.turn_rewards import turn_ends, turn_rewards
from atropos_core.types import ScoredGroup
from atropos_records.dataset import DatasetExport
from atropos_records.groups import live_group, recorded_groups
from atropos_records.record_checks import Expected, check_step
from atropos_records.rollout_records import RolloutRecords
from atropos_records.selection import Selection
from atropos_testing.samples import make_group
from tests.placed_rewards import GROUPS, written
from tests.recorded_runs import recorded
from tests.unit.parts import TOKENIZER


def with_turns(values: list[float]) -> ScoredGroup:
    """A group of two episodes; the first has turn rewards at its first sampled tokens."""
    made = make_group(0, [1.0, 2.0])
    first = made.episodes[0]
    [rollout] = first.rollouts
    start = int(rollout.sampled.argmax()) + 1
    turns = turn_rewards(range(start, start + len(values)), values)
    return replace(
        made, episodes=(replace(first, rollouts=(replace(rollout, turns=turns),)), *made.episodes[1:])
    ).with_advantages(np.array([-1, 1]))


@settings(max_examples=60, deadline=None)
@given(GROUPS)
def test_a_record_gives_back_every_bit_of_scores_and_turn_rewards(made: ScoredGroup):
    for record, episode in zip(live_group(made).episodes, made.episodes, strict=True):
        assert record.score == episode.score
        given_turns = [written(rollout.turns) for rollout in episode.rollouts]
        assert [*map(written, record.turn_rewards)] == (given_turns if any(given_turns) else [])


async def test_turn_rewards_are_recorded_on_the_line_of_their_episode_and_exported(tmp_path: Path):
    values = [0.1, -2e-17, 1e9]
    run = await recorded(tmp_path / "run", [with_turns(values)])
    first, second = RolloutRecords(run).step(1).episodes
    assert first.turn_rewards[0].values.tolist() == values
    assert second.turn_rewards == ()
    lines = [json.loads(line) for line in (run / "rollouts" / "step-000001.jsonl").read_text().splitlines()]
    assert ["turn_rewards" in line for line in lines] == [True, False]
    for name, folder in (
        ("with tokens", run),
        ("without", await recorded(tmp_path / "bare", [with_turns(values)], tokens=False)),
    ):
        export = DatasetExport("parquet", tmp_path / f"{name}.parquet", Selection())
        for group in recorded_groups(RolloutRecords(folder)):
            export.add(group)
        export.finish()
        rows = pyarrow.parquet.read_table(tmp_path / f"{name}.parquet").to_pylist()
        assert [row["turn_rewards"] for row in rows] == [values, None]
        assert rows[0]["turn_ends"] == first.turn_rewards[0].ends.tolist()
        assert [row["input_ids"] is None for row in rows] == [name == "without"] * 2


async def test_the_order_of_turns_is_recorded_only_if_there_is_one(tmp_path: Path):
    made = make_group(0, [1.0, 2.0])
    first = made.episodes[0]
    [rollout] = first.rollouts
    several = tuple(replace(rollout, tokens=rollout.tokens + at, turn_order=np.array([1 - at])) for at in (0, 1))
    made = replace(made, episodes=(replace(first, rollouts=several), *made.episodes[1:]))
    run = await recorded(tmp_path / "run", [made.with_advantages(np.array([-1, 1]))])
    step = RolloutRecords(run).step(1)
    assert [one.turn_order for one in step.episodes] == [((1,), (0,)), ()]


async def test_records_of_runs_before_turn_rewards_are_read_as_before(tmp_path: Path):
    run = await recorded(tmp_path / "run", [make_group(0, [1.0, 2.0])])
    assert "turn_rewards" not in (run / "rollouts" / "step-000001.jsonl").read_text()
    assert [one.turn_rewards for one in RolloutRecords(run).step(1).episodes] == [(), ()]


async def changed(tmp_path: Path, change: Any) -> RolloutRecords:
    """A run whose first line has other turn rewards."""
    run = await recorded(tmp_path / "run", [with_turns([1.0, 2.0])])
    path = run / "rollouts" / "step-000001.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    lines[0]["turn_rewards"] = change
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return RolloutRecords(run)


@pytest.mark.parametrize(
    "change", [[{"ends": [3, 3], "values": [1, 2]}], [{"ends": [3]}], ["no"], [{"ends": ["a"], "values": [1]}], 3]
)
async def test_damaged_turn_rewards_are_one_error_with_their_line(tmp_path: Path, change: Any):
    records = await changed(tmp_path, change)
    with pytest.raises(DataError, match=r"step-000001.jsonl is damaged: line 1"):
        _ = records.step(1).episodes


async def test_an_audit_names_turn_rewards_that_are_at_no_sampled_token(tmp_path: Path):
    [rollout] = with_turns([1.0]).episodes[0].rollouts
    end = int(turn_ends(rollout)[-1])
    cases = [
        ([{"ends": [end], "values": [1]}], []),
        ([{"ends": [1, end], "values": [1, 1]}], ["it has a turn reward, and was not sampled"]),
        (
            [{"ends": [end, 999], "values": [1, 1]}],
            [f"line 1 has a turn reward here, and the sequence has {end} tokens"],
        ),
        ([None, None], ["line 1 has turn rewards of 2 sequences, and it has 1"]),
    ]
    for number, (change, wanted) in enumerate(cases):
        (tmp_path / str(number)).mkdir()
        step = (await changed(tmp_path / str(number), change)).step(1)
        faults = check_step(step, {}, Expected({}, None, TOKENIZER))
        assert [fault.says for fault in faults if "turn reward" in fault.says] == wanted

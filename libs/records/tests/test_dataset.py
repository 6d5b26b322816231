"""What is exported of recorded rollouts, and that `datasets` reads it as it was."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from datasets import load_dataset

from atropos_core.cli import run_app
from atropos_core.interfaces import SettledGroup
from atropos_records.rollout_records import RolloutRecords
from atropos_testing.samples import make_episode, make_group, make_task
from tests.recorded_runs import group_of, recorded, says, settled, user


def export(capsys: pytest.CaptureFixture[str], run: Path, form: str, out: Path, *flags: str) -> dict[str, Any]:
    capsys.readouterr()
    assert run_app(["export", str(run), "--as", form, "--out", str(out), "--json", *flags]) == 0, (
        capsys.readouterr().err
    )
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def read(path: Path, folder: Path) -> list[dict[str, Any]]:
    kind = {".jsonl": "json", ".parquet": "parquet"}[path.suffix]
    return list(load_dataset(kind, data_files=str(path), split="train", cache_dir=str(folder / "cache")))


@pytest.fixture(params=["jsonl", "parquet"])
def suffix(request: pytest.FixtureRequest) -> str:
    return str(request.param)


CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": [2, {"c": "x"}]}}}
OTHER = {"id": "call_1", "type": "function", "function": {"name": "find", "arguments": json.dumps({"query": "é"})}}


async def test_conversations_are_read_by_datasets_with_tool_calls_as_they_were(tmp_path, capsys, suffix):
    said = [
        user("1 + 2?"),
        says("", tool_calls=[CALL]),
        {"role": "tool", "content": "3"},
        says("3", reasoning_content="so"),
    ]
    found = [
        user("find"),
        says("é \U0001f600", tool_calls=[OTHER]),
        {"role": "tool", "content": "", "tool_call_id": "call_1"},
        says("no"),
    ]
    run = await recorded(tmp_path / "run", [group_of(0, [1.0, 0.25], said, [*found, user("thanks")])])
    made = export(capsys, run, "sft", out := tmp_path / f"out.{suffix}")
    assert (made["written"], made["left_out"], made["path"]) == (2, {}, str(out))
    first, second = read(out, tmp_path)
    assert first == {
        "messages": said,
        "tools": None,
        "reward": 1.0,
        "task": "task-0",
        "environment": "sample",
        "step": 1,
    }
    arguments = {**OTHER, "function": {"name": "find", "arguments": {"query": "é"}}}
    assert second["messages"] == [found[0], {**found[1], "tool_calls": [arguments]}, *found[2:]], "up to the last reply"


async def test_what_is_worth_imitating_is_chosen_and_the_rest_is_counted_by_its_reason(tmp_path, capsys):
    groups = [make_group(0, [0.5, 2, 1, 2], failed=1), make_group(1, [-1, 0])]
    run = await recorded(tmp_path / "run", groups, [make_group(2, [3.0])])

    def exported(*flags: str) -> tuple[list[tuple[str, float]], Mapping[str, int]]:
        out = tmp_path / f"{len(list(tmp_path.iterdir()))}.jsonl"
        left_out = export(capsys, run, "sft", out, *flags)["left_out"]
        return [(row["task"][-1], row["reward"]) for row in map(json.loads, out.read_text().splitlines())], left_out

    failed = {"the rollout failed": 1}
    every = [("0", 0.5), ("0", 2.0), ("0", 1.0), ("0", 2.0), ("1", -1.0), ("1", 0.0), ("2", 3.0)]
    assert exported() == (every, failed)
    assert exported("--step", "1") == (every[:-1], failed)
    assert exported("--min-reward", "1") == (every[1:4] + every[6:], {"reward below --min-reward": 3, **failed})
    assert exported("--only-correct") == (every[:4] + every[6:], {"not correct": 2, **failed})
    assert exported("--best-per-group", "1") == (
        [every[1], every[5], every[6]], {"not among the best of its group": 4, **failed},
    )  # fmt: skip


async def test_rewards_are_those_before_a_transform_changed_them(tmp_path, capsys):
    scored = make_group(0, [0.0, 3.0])
    changed = replace(scored, rewards=np.array([1.0, -1.0], np.float32))
    run = await settled(tmp_path / "run", [SettledGroup(changed, "trained", scored=scored.rewards)])
    export(capsys, run, "sft", tmp_path / "a.jsonl", "--best-per-group", "1")
    assert [row["reward"] for row in read(tmp_path / "a.jsonl", tmp_path)] == [3.0]


async def test_what_is_no_conversation_of_the_policy_is_left_out_by_name(tmp_path, capsys):
    task = make_task()
    cut, odd, silent = (make_episode(task, "yes", 1.0) for _ in range(3))
    several = replace(make_episode(task, "a"), rollouts=make_episode(task, "a").rollouts * 2)
    episodes = (
        replace(cut, finish="length"),
        replace(odd, messages=(user("?"), says("\ud83d"))),
        replace(silent, messages=(user("?"),)),
        several,
        make_episode(task, "whole"),
    )
    group = replace(make_group(0, [1.0] * 5), episodes=episodes)
    run = await recorded(tmp_path / "run", [group])
    assert export(capsys, run, "sft", tmp_path / "a.jsonl") | {"path": ""} == {
        "path": "", "form": "sft", "written": 1, "without_tokens": {}, "url": None,
        "left_out": {
            "cut off at the token limit (--keep-cut-off keeps them)": 1,
            "half a surrogate pair in a message, which is not Unicode text": 1,
            "no reply of the policy among its messages": 1,
            "several token histories: its messages are not one conversation": 1,
        },
    }  # fmt: skip
    assert export(capsys, run, "sft", tmp_path / "b.jsonl", "--keep-cut-off")["written"] == 2


async def test_pairs_part_at_the_last_reply_and_the_largest_margin_is_taken(tmp_path, capsys, suffix):
    shared = [user("2 + 2?"), says("", tool_calls=[CALL]), {"role": "tool", "content": "4"}]
    early = [user("2 + 2?"), says("I do not know"), user("try"), says("5")]
    pairs = group_of(0, [0.5, 1.0, 0.0, -9.0], [*shared, says("4!")], [*shared, says("4")], [*shared, says("3")], early)
    parted = group_of(
        1, [1.0, 0.0], [user("x"), says("a"), user("y"), says("b")], [user("x"), says("c"), user("y"), says("d")]
    )
    same = group_of(2, [1.0, 0.0], [user("x"), says("a")], [user("x"), says("a")])
    run = await recorded(tmp_path / "run", [pairs, parted, same, make_group(3, [1, 1]), make_group(4, [1.0], failed=1)])
    made = export(capsys, run, "dpo", out := tmp_path / f"out.{suffix}")
    assert made["left_out"] == {
        "the rollout failed": 1,
        "groups whose conversations part before the last reply (several turns: see --as sft --best-per-group 1)": 1,
        "groups whose last replies are the same text": 1,
        "groups whose rewards are all equal": 1,
        "groups with fewer than two usable rollouts": 1,
    }
    [row] = read(out, tmp_path)
    assert row == {
        "prompt": shared, "chosen": [says("4")], "rejected": [says("3")], "tools": None, "score_chosen": 1.0, "score_rejected": 0.0,
        "task": "task-0", "environment": "sample", "step": 1,
    }  # fmt: skip
    assert run_app(["export", str(run), "--as", "dpo", "--out", str(tmp_path / "b.jsonl"), "--min-margin", "1.5"]) == 1
    assert "groups without a margin of --min-margin" in capsys.readouterr().err


async def test_parquet_has_every_episode_and_every_token_that_is_recorded(tmp_path, capsys):
    group = make_group(0, [0, 1], failed=1).with_advantages(np.array([-1, 1]))
    two = replace(group.episodes[1], rollouts=group.episodes[1].rollouts * 2)
    run = await recorded(tmp_path / "run", [replace(group, episodes=(group.episodes[0], two))])
    made = export(capsys, run, "parquet", out := tmp_path / "out.parquet")
    assert (made["written"], made["left_out"], made["without_tokens"]) == (4, {}, {})
    rows = read(out, tmp_path)
    assert [(row["member"], row["sequence"], bool(row["failed"])) for row in rows] == [
        (0, 0, False), (1, 0, False), (1, 1, False), (None, None, True),
    ]  # fmt: skip
    step = RolloutRecords(run).step(1)
    for row in rows[:3]:
        episode = step.episodes[row["member"]]
        tokens = step.sequences(episode)[row["sequence"]]
        assert row["input_ids"] == tokens.ids.tolist()
        assert row["response_mask"] == tokens.sampled.tolist()
        assert row["loss_mask"] == tokens.trained.tolist()
        assert row["policy_versions"] == tokens.versions.tolist()
        for name, column in (("logprobs", tokens.logprobs), ("advantages", tokens.advantages)):
            assert row[name] == [None if np.isnan(value) else value for value in column.tolist()]
        assert row["entropy"] is None and row["temperature"] == 1.0
        assert (row["reward"], row["advantage"], row["parts"]) == (
            episode.reward,
            episode.advantage,
            dict(episode.parts),
        )
        assert row["messages"] == list(episode.messages)
    assert (rows[3]["failed"], rows[3]["failed_in"], rows[3]["input_ids"]) == ("a rollout that failed", "rollout", None)


async def test_a_run_without_tokens_is_exported_and_the_reason_is_said(tmp_path, capsys):
    run = await recorded(tmp_path / "run", [make_group(0, [0, 1])], tokens=False)
    made = export(capsys, run, "parquet", out := tmp_path / "out.parquet")
    assert made["without_tokens"] == {"the run does not record tokens: sink.jsonl.tokens is false": 2}
    assert [row["input_ids"] for row in read(out, tmp_path)] == [None, None]


async def test_the_same_records_give_the_same_bytes(tmp_path, capsys):
    run = await recorded(tmp_path / "run", [make_group(0, [0, 1, 2])], [make_group(1, [1, 0])])
    for form, name in (("sft", "a.jsonl"), ("dpo", "b.parquet"), ("parquet", "c.parquet")):
        export(capsys, run, form, tmp_path / name)
        export(capsys, run, form, tmp_path / f"again-{name}")
        assert (tmp_path / name).read_bytes() == (tmp_path / f"again-{name}").read_bytes()


async def test_what_cannot_be_is_refused_in_one_sentence_and_leaves_no_file(tmp_path, capsys):
    run = await recorded(tmp_path / "run", [make_group(0, [0, 1])])
    (tmp_path / "precious.jsonl").write_text("precious")
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty/config.toml").write_text("")
    before = sorted(tmp_path.rglob("*"))
    for form, name, flags, wanted in (
        ("sft", "precious.jsonl", (), "precious.jsonl is there already"),
        ("sft", "out.csv", (), "Name it NAME.jsonl or NAME.parquet"),
        ("parquet", "out.jsonl", (), "Name it NAME.parquet"),
        ("sft", "out.jsonl", ("--min-margin", "1"), "--min-margin has no effect with --as sft: it is for dpo"),
        (
            "parquet",
            "out.parquet",
            ("--only-correct",),
            "--only-correct has no effect with --as parquet: it is for sft",
        ),
        ("dpo", "out.jsonl", ("--best-per-group", "1"), "--best-per-group has no effect with --as dpo"),
        ("parquet", "out.parquet", ("--keep-cut-off",), "it is for sft and dpo"),
        ("sft", "out.jsonl", ("--min-reward", "5"), "nothing is left to write with --as sft: 2 times: reward below"),
        ("sft", "out.jsonl", ("--step", "7"), "has no rollouts of step 7: 1 are, from 1 to 1"),
    ):
        assert run_app(["export", str(run), "--as", form, "--out", str(tmp_path / name), *flags]) != 0
        assert wanted in " ".join(capsys.readouterr().err.split())
    assert run_app(["export", str(tmp_path / "empty"), "--as", "sft", "--out", str(tmp_path / "out.jsonl")]) != 0
    assert "has no recorded rollouts" in capsys.readouterr().err
    assert sorted(tmp_path.rglob("*")) == before and (tmp_path / "precious.jsonl").read_text() == "precious"


ADD = {
    "type": "function",
    "function": {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}},
}
FIND = {
    "type": "function",
    "function": {"name": "find", "description": "é", "parameters": {"type": "object", "properties": {}}},
}


async def test_the_tools_that_the_policy_was_shown_are_recorded_once_and_exported_beside_each_conversation(
    tmp_path, capsys, suffix
):
    groups = [group_of(n, [1.0, 0.5], [user("1 + 2?"), says("3")], [user("1 + 2?"), says("4")]) for n in range(3)]
    shown = [
        SettledGroup(group, "trained", tools=tools)
        for group, tools in zip(groups, [(ADD,), (ADD, FIND), ()], strict=True)
    ]
    run = await settled(tmp_path / "run", shown, shown[:2])
    assert len((run / "rollouts/tools.jsonl").read_text().splitlines()) == 2, "each set once"
    for form, count in (("sft", 2), ("dpo", 1)):
        export(capsys, run, form, out := tmp_path / f"{form}.{suffix}")
        tools = [row["tools"] for row in read(out, tmp_path)]
        one, two = [[ADD]] * count, [[ADD, FIND]] * count
        assert tools == [*one, *two, *[None] * count, *one, *two]

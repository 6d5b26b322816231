"""`atropos process`: rollouts without a trainer, through the command line, on the toy policy."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

import pyarrow.parquet as pq
import pytest

from atropos_trajectory_api.legacy_groups.outgoing_groups import KEYS

TOY = ("process", "--model", "toy")
SMALL = ("--group-size", "2")


def lines_of(path):
    text = path.read_text()
    assert text.endswith("\n")
    return [json.loads(line) for line in text.splitlines()]


def test_one_line_a_group_in_the_old_schema(atropos, sevens, tmp_path):
    ended = atropos(*TOY, "--env", sevens, "--groups", "5", *SMALL, "--old-schema", "--out", "to/old.jsonl")
    assert ended.code == 0, ended.err
    assert "5 groups: to/old.jsonl" in ended.out
    rows = lines_of(tmp_path / "to/old.jsonl")
    assert len(rows) == 5
    for row in rows:
        assert list(row) == list(KEYS)
        assert len(row["tokens"]) == len(row["masks"]) == len(row["inference_logprobs"]) == len(row["scores"]) == 2
        for ids, mask, logprobs in zip(row["tokens"], row["masks"], row["inference_logprobs"], strict=True):
            assert all(m in (-100, token) for m, token in zip(mask, ids, strict=True))
            assert [m == -100 for m in mask] == [logprob == 1.0 for logprob in logprobs]
            assert any(m != -100 for m in mask)
    assert [row["messages"][0][0]["content"] for row in rows] == [f"say 7 to {n}" for n in range(5)], "in order"


def test_one_line_a_group_with_every_field_of_the_record(atropos, sevens, tmp_path):
    ended = atropos(*TOY, "--env", sevens, "--groups", "3", *SMALL, "--test", "--out", "new.jsonl")
    assert ended.code == 0, ended.err
    rows = lines_of(tmp_path / "new.jsonl")
    assert [row["task"]["id"] for row in rows] == ["test-16", "test-17", "test-18"]
    episode = rows[0]["episodes"][1]
    assert rows[0]["rewards"][1] == pytest.approx(episode["score"])
    assert set(episode["rollouts"][0]) >= {"tokens", "sampled", "trained", "logprobs", "policy_version", "temperature"}
    assert rows[0]["draw"]["environment"] == "sevens"


def test_a_split_without_tasks_is_refused_with_the_flag_that_chooses_the_other(atropos, tmp_path):
    (tmp_path / "half.py").write_text(
        "from atropos_core import Environment\n\n\nclass Half(Environment):\n    def tasks(self, split):\n        return []\n"
        "    async def score(self, task, reply):\n        return 0.0\n"
    )
    for flags, remedy in (((), "--test"), (("--test",), "Leave --test out")):
        ended = atropos(*TOY, "--env", "./half.py", *flags, "--out", "new.jsonl")
        assert ended.code == 1 and remedy in ended.err and "--split" not in ended.err, ended.err


def test_the_same_seed_gives_the_same_file(atropos, sevens, tmp_path):
    for name in ("one", "two"):
        assert atropos(*TOY, "--env", sevens, "--groups", "20", *SMALL, "--out", name, "--seed", "3").code == 0
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()


def test_a_data_set_of_live_rollouts(atropos, sevens, tmp_path):
    kept = (*TOY, "--env", sevens, "--groups", "30", *SMALL, "--keep-cut-off")
    for form, name in (("sft", "sft.jsonl"), ("dpo", "dpo.jsonl"), ("parquet", "rows.parquet")):
        flags = kept[:-1] if form == "parquet" else kept
        ended = atropos(*flags, "--as", form, "--out", name)
        assert ended.code == 0 and f"rows: {name}" in ended.out, ended.err
    assert atropos(*kept[:-1], "--out", "groups.jsonl").code == 0
    groups = lines_of(tmp_path / "groups.jsonl")
    episodes = [episode for group in groups for episode in group["episodes"]]
    rows = lines_of(tmp_path / "sft.jsonl")
    assert [row["messages"] for row in rows] == [episode["messages"] for episode in episodes]
    assert [row["reward"] for row in rows] == pytest.approx([reward for group in groups for reward in group["rewards"]])
    recorded = pq.read_table(tmp_path / "rows.parquet").to_pylist()
    rollouts = [rollout for episode in episodes for rollout in episode["rollouts"]]
    assert [row["input_ids"] for row in recorded] == [rollout["tokens"] for rollout in rollouts]
    assert [row["response_mask"] for row in recorded] == [
        [bool(one) for one in rollout["sampled"]] for rollout in rollouts
    ]
    for pair in lines_of(tmp_path / "dpo.jsonl"):
        assert pair["score_chosen"] > pair["score_rejected"]
    ended = atropos(*TOY, "--env", sevens, "--as", "sft", "--old-schema", "--out", "a.jsonl")
    assert ended.code == 2 and "--old-schema has no effect with --as" in ended.err
    ended = atropos(*TOY, "--env", sevens, "--only-correct", "--out", "a.jsonl")
    assert ended.code == 2 and "--only-correct has no effect without --as: it is for sft" in ended.err


def test_a_file_that_is_there_is_not_touched(atropos, sevens, tmp_path):
    (tmp_path / "old.jsonl").write_text("precious")
    ended = atropos(*TOY, "--env", sevens, "--out", "old.jsonl")
    assert ended.code == 1
    assert "old.jsonl exists already" in ended.err
    assert (tmp_path / "old.jsonl").read_text() == "precious"


FAILING = """
from atropos_core import Environment, Task

class Failing(Environment):
    def tasks(self, split):
        return [Task(str(n), ({"role": "user", "content": str(n)},)) for n in range(6)]
    async def score(self, task, reply):
        if int(task.id) % EVERY == 0:
            raise ValueError(f"no score for {task.id}")
        return 1.0
"""


def test_groups_that_failed_as_a_whole_are_left_out_of_the_old_schema_and_kept_in_ours(atropos, tmp_path):
    (tmp_path / "some.py").write_text(FAILING.replace("EVERY", "3"))
    ended = atropos(*TOY, "--env", "./some.py", "--groups", "6", *SMALL, "--old-schema", "--out", "old.jsonl")
    assert ended.code == 0, ended.err
    assert "2 groups are left out" in ended.err
    assert len(lines_of(tmp_path / "old.jsonl")) == 4
    assert atropos(*TOY, "--env", "./some.py", "--groups", "6", *SMALL, "--out", "new.jsonl").code == 0
    rows = lines_of(tmp_path / "new.jsonl")
    assert [len(row["failed"]) for row in rows] == [2, 0, 0, 2, 0, 0]
    assert "no score for 3" in rows[3]["failed"][0]["cause"]


def test_an_environment_that_only_fails_ends_it_with_the_cause_and_leaves_no_empty_file(atropos, tmp_path):
    (tmp_path / "all.py").write_text(FAILING.replace("EVERY", "1"))
    ended = atropos(*TOY, "--env", "./all.py", "--groups", "6", *SMALL, "--old-schema", "--out", "old.jsonl")
    assert ended.code == 1
    assert "the last 6 groups all failed" in ended.err
    assert "no score for" in ended.err
    assert not (tmp_path / "old.jsonl").exists()


def test_stopping_it_leaves_whole_lines_and_no_temporary_file(sevens, tmp_path):
    (tmp_path / "temporary").mkdir()
    process = subprocess.Popen(
        [sys.executable, "-m", "atropos_core", *TOY, "--env", sevens, "--groups", "100000", *SMALL, "--out", "o.jsonl",
         "--set", "engine.latency_s=0.01"],
        cwd=tmp_path, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "COLUMNS": "160", "TMPDIR": str(tmp_path / "temporary")},
    )  # fmt: skip
    until = time.monotonic() + 60
    path = tmp_path / "o.jsonl"
    while not path.exists() or path.read_bytes().count(b"\n") < 20:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < until
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 130
    rows = lines_of(path)
    assert f"o.jsonl has the {len(rows)} groups that were ready" in err
    assert not list((tmp_path / "temporary").iterdir())

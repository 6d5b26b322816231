"""`atropos eval` of the tiny policy on a real engine: twice the same, and its files say what its table says."""

from __future__ import annotations

import json
from fractions import Fraction
from math import comb

import pytest

pytestmark = pytest.mark.slow

EVAL = ("eval", "--env", "gsm8k", "--model", "tiny", "--problems", "12", "--samples", "8", "--temperature", "1",
        "--set", "evaluation.pass_at=[1, 4, 8]", "--set", "engine.threads=1")  # fmt: skip


def test_an_evaluation_of_no_problems_is_refused_and_says_what_to_type(atropos, tmp_path):
    ended = atropos("eval", "--env", "gsm8k", "--model", "tiny", "--problems", "0")
    assert ended.code == 2 and "--problems 512" in ended.err and "held-out tasks" not in ended.err, ended.err


def test_two_evaluations_of_the_same_weights_agree_and_keep_every_reply(atropos, tmp_path):
    for name in ("once.json", "again"):
        ended = atropos(*EVAL, "--out", name)
        assert ended.code == 0, ended.err
    once, again = (json.loads((tmp_path / f"{name}.json").read_text()) for name in ("once", "again"))
    assert once["metrics"] == again["metrics"]
    assert once["tokens"] == again["tokens"]
    assert once["evaluation"]["sampling"]["temperature"] == 1
    lines = (tmp_path / "once.jsonl").read_text()
    ended = atropos(*EVAL, "--out", "again")
    assert ended.code == 1 and "again.json is there already" in ended.err and "engine to start" not in ended.err, (
        ended.err
    )
    assert lines == (tmp_path / "again.jsonl").read_text()

    rows = [json.loads(line) for line in lines.splitlines()]
    assert [(len(row["samples"]), row["total"]) for row in rows] == [(8, 8)] * 12
    assert len({row["correct"] for row in rows}) > 2
    for k in (1, 4, 8):
        exact = sum(1 - Fraction(comb(8 - row["correct"], k), comb(8, k)) for row in rows) / 12
        assert once["metrics"][f"eval/pass@{k}"] == pytest.approx(float(exact), abs=1e-12)
        assert once["metrics"][f"eval/pass@{k}_strict"] <= once["metrics"][f"eval/pass@{k}_lenient"]
        low, high = once["intervals"][f"eval/pass@{k}"]
        assert low <= float(exact) <= high
    replies = [sample for row in rows for sample in row["samples"]]
    assert {sample["finish"] for sample in replies} <= {"stop", "length"}
    assert sum(sample["tokens"] for sample in replies) == once["tokens"]


def test_a_checkpoint_of_a_run_is_named_by_its_step_and_figures_lie_with_the_run(atropos, tmp_path):
    small = ("--set", "training.groups_per_step=2", "--set", "evaluation.problems=4", "--set", "checkpoint.every=1")
    ended = atropos("run", "--env", "gsm8k", "--steps", "2", "--dir", "run", *small, "--set", "engine.threads=1")
    assert ended.code == 0, ended.err
    ended = atropos("eval", "run", "--step", "1")
    assert ended.code == 0, ended.err
    [figures] = (tmp_path / "run" / "evaluations").glob("step-000001-*.json")
    assert json.loads(figures.read_text())["metrics"]["eval/problems"] == 4
    ended = atropos("eval", "run", "--step", "7")
    assert ended.code != 0
    assert "no checkpoint of step 7" in ended.err
    assert "Choose one of: 1, 2." in ended.err


def test_a_toy_policy_is_no_model_and_the_error_says_so(atropos, sevens):
    assert (
        atropos(
            "run", "--model", "toy", "--env", sevens, "--steps", "1", "--set", "evaluation.problems=2", "--dir", "run"
        ).code
        == 0
    )
    ended = atropos("eval", "run")
    assert ended.code == 1 and "a table that only its own run can load" in " ".join(ended.err.split()), ended.err

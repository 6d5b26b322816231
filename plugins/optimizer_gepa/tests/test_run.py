"""A whole run: each step rewards one prompt, the best is saved next to the model, and a resumed run continues with the same prompts."""

from __future__ import annotations

import json

import pytest

from tests.conftest import metrics_of
from tests.e2e.runs import RunningRun, finish

pytestmark = pytest.mark.slow

RUN = (
    "run", "--env", "prompted:gsm8k", "--trainer", "gepa", "--bridge", "prompt", "--deterministic",
    "--set", "transform.group_advantage.baseline=none", "--set", "trainer.proposer=first_words",
    "--set", "transform.drop_flat.use=none", "--set", "evaluation.problems=0", "--set", "training.groups_per_step=8",
    "--set", "training.group_size=2", "--set", "checkpoint.every=2", "--set", "checkpoint.keep=9",
)  # fmt: skip


def tried(folder, step):
    return json.loads((folder / f"checkpoints/step-{step:06d}/policy/candidates.json").read_text())


def test_prompts_are_tried_one_after_another_and_a_killed_run_goes_on_with_the_same(tmp_path, atropos):
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    spaced = ("--set", "environment.gsm8k.separator= ")
    finish(whole, *RUN, *spaced, "--steps", "6", "--dir", str(whole))
    lines = metrics_of(whole)
    assert all(line["alignment/max_abs_logprob_diff"] < 1e-4 for line in lines)
    assert [len(tried(whole, step)) for step in (2, 4, 6)] == [3, 5, 7], "each with the one that is sampled next"
    means = [sum(one["scores"].values()) / 8 for one in tried(whole, 6)[:6]]
    assert max(means) > 0
    policy = whole / "checkpoints/step-000006/policy"
    assert tried(whole, 6)[-1]["prompt"] == (policy / "prompt.txt").read_text(), "the last evaluation is of the best"

    run = RunningRun(broken, *RUN, *spaced, "--steps", "6", "--dir", str(broken))
    run.wait_for_step(3)
    run.kill("supervisor")
    run.ended_within(60)
    finish(broken, "resume", str(broken))
    assert tried(broken, 6) == tried(whole, 6)

    prompt = (policy / "prompt.txt").read_text()
    evaluated = atropos(
        "eval", "--env", "prompted:gsm8k", "--model", str(policy), "--problems", "4", "--out", "problems.jsonl"
    )
    assert evaluated.code == 0, evaluated.err
    shown = [json.loads(line) for line in (tmp_path / "problems.jsonl").read_text().splitlines()]
    assert all(prompt in json.dumps(one) for one in shown)


def test_a_run_whose_rewards_are_compared_within_groups_is_refused_with_what_to_set(tmp_path, atropos):
    ended = atropos(*RUN[:8], "--set", "trainer.proposer=first_words", "--steps", "1")
    assert ended.code == 2
    assert "transform.group_advantage.baseline=none" in ended.err
    ended = atropos(*RUN[:12], *RUN[14:], "--steps", "1")
    assert ended.code == 2
    assert "'drop_flat' leaves out groups" in ended.err and "transform.drop_flat.use=none" in ended.err
    ended = atropos("run", "--env", "gsm8k", *RUN[3:], "--steps", "1")
    assert ended.code != 0
    assert "--env prompted:NAME" in ended.err


def test_a_prompt_goes_by_its_own_bridge_and_weights_never_by_it(atropos):
    gepa = (*RUN[:5], "--set", "trainer.proposer=first_words", *RUN[8:10], *RUN[12:14])
    ended = atropos(*gepa, "--bridge", "checkpoint", "--dry-run")
    assert ended.code == 2
    assert "trainer 'gepa' gives prompt" in ended.err and "Use --bridge prompt." in ended.err
    ended = atropos("run", "--env", "prompted:gsm8k", "--bridge", "prompt", "--dry-run")
    assert ended.code == 2
    assert "bridge 'prompt' does not fit: it carries prompt;" in ended.err
    assert "Use --bridge checkpoint or --bridge delta or --bridge ipc or --bridge lora" in ended.err.replace("\n", " ")

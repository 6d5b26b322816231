"""A real run with a curriculum: killed and resumed it ends with the same weights and the same estimates."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.runs import RunningRun, finish, weights

STEPS = 6
QUICK = (
    "--env", "gsm8k", "--deterministic", "--steps", str(STEPS), "--set", "curriculum.use=window",
    "--set", "environment.gsm8k.problems=40", "--set", "training.groups_per_step=4", "--set", "training.group_size=4",
    "--set", "training.refill_rounds=1", "--set", "checkpoint.every=1", "--set", "evaluation.problems=8",
)  # fmt: skip


def learned(run: Path) -> Any:
    manifest = json.loads((run / f"checkpoints/step-{STEPS:06d}/manifest.json").read_text())
    return manifest["state"]["parts"]["curriculum"]


@pytest.mark.slow
def test_a_killed_run_resumes_to_the_same_weights_and_estimates(tmp_path):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    finish(whole, "run", *QUICK, "--dir", str(whole))
    run = RunningRun(killed, "run", *QUICK, "--dir", str(killed))
    run.wait_for_step(2)
    run.kill("supervisor")
    run.ended_within(60)
    finish(killed, "resume", str(killed))
    assert weights(killed, STEPS) == weights(whole, STEPS)
    assert learned(killed) == learned(whole)
    assert learned(whole)["settled"] >= STEPS * 4
    last = json.loads((whole / "metrics.jsonl").read_text().splitlines()[-1])
    assert {"curriculum/pool", "curriculum/drawn_success", "curriculum/too_hard"} <= last.keys()

"""The tiny policy, trained for five steps in environments of other worlds, as a command of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tomli_w

STEPS = 5
GROUPS = 6  # of each environment in a step, on average


def train(
    folder: Path,
    environments: Mapping[str, Mapping[str, Any]],
    *,
    max_tokens: int = 24,
    model: str = "tiny",
    deadline_s: float = 220,
    **training: Any,
) -> list[dict[str, Any]]:
    """Train all of them at once, and give the metrics of each step. Fails where the run does, where a rollout fails, where what
    was trained is not what was sampled, and where nothing was learnt from in one of the environments."""
    settings = {"steps": STEPS, "groups_per_step": GROUPS * len(environments), "group_size": 8, **training}
    run = {
        "model": model, "plot": "never", "training": settings, "sampling": {"max_tokens": max_tokens},
        "evaluation": {"problems": 0}, "environment": environments,
    }  # fmt: skip
    (folder / "run.toml").write_text(tomli_w.dumps(run))
    ended = subprocess.run(
        [sys.executable, "-m", "atropos_core", "run", "run.toml", "--dir", "run"],
        cwd=folder, capture_output=True, text=True, timeout=deadline_s, env={**os.environ, "HF_HUB_OFFLINE": "1"},
    )  # fmt: skip
    assert ended.returncode == 0, ended.stdout + ended.stderr
    rows = [json.loads(line) for line in (folder / "run/metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if row["step"] > 0]
    assert [row["step"] for row in steps] == list(range(1, STEPS + 1))
    assert sum(row["rollouts/failed"] for row in steps) == 0, ended.stdout + ended.stderr
    assert all(
        row["alignment/max_abs_logprob_diff"] <= 1e-4 for row in steps if "alignment/max_abs_logprob_diff" in row
    )
    learnt = trained_groups(folder / "run")
    assert all(learnt[name] for name in environments), f"groups that were trained: {dict(learnt)}"
    return steps


def trained_groups(run: Path) -> Counter[str]:
    """How many groups of each environment were trained."""
    found: set[tuple[str, int]] = set()
    for file in (run / "rollouts").glob("step-*.jsonl"):
        rows = [json.loads(line) for line in file.read_text().splitlines()]
        found |= {(row["environment"], row["draw"]) for row in rows if row["outcome"] == "trained"}
    return Counter(name for name, _ in found)

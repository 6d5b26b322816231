"""What a short deterministic run of the tiny policy comes to, on one thread: recorded, to show that a change of structure changes nothing.

`python -m tests.pins.golden` writes golden.json anew. Two runs on one machine agree to the bit; other CPUs may round otherwise, so
weights are recorded as the norm and the sum of each tensor. What was sampled in the first step is recorded exactly.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from safetensors.numpy import load_file

RECORDED = Path(__file__).with_name("golden.json")
RUN = (
    "run", "--bridge", "ipc", "--env", "gsm8k", "--deterministic", "--steps", "3", "--set", "training.groups_per_step=4",
    "--set", "training.group_size=4", "--set", "evaluation.problems=8", "--set", "trainer.threads=1", "--set", "engine.threads=1",
    "--set", "checkpoint.every=0", "--set", "trainer.warmup_steps=0",
    "--set", "trainer.learning_rate=1e-3",  # so that weights move by more than rounding does
)  # fmt: skip


def run(folder: Path) -> dict[str, Any]:
    """What a run in this new directory comes to."""
    command = [sys.executable, "-m", "atropos_core", *RUN, "--dir", str(folder)]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    subprocess.run(command, check=True, capture_output=True, timeout=200, env=environment)
    metrics = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    weights = load_file(folder / "checkpoints/step-000003/policy/model.safetensors")
    return {
        "metrics": sorted({name for line in metrics for name in line}),
        "rollouts": [rollouts(folder, step) for step in (1, 2, 3)],
        "sampled in step 1": hashlib.sha256(json.dumps(sampled_texts(folder, 1)).encode()).hexdigest(),
        "weights": {
            name: [float((one.astype("f8") ** 2).sum() ** 0.5), float(one.sum(dtype="f8"))]
            for name, one in sorted(weights.items())
        },
    }


def rows(folder: Path, step: int) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / f"rollouts/step-{step:06d}.jsonl").read_text().splitlines()]


def rollouts(folder: Path, step: int) -> list[list[Any]]:
    return [[row["task"], row["reward"]] for row in rows(folder, step)]


def sampled_texts(folder: Path, step: int) -> list[str]:
    return [row["messages"][-1]["content"] for row in rows(folder, step)]


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as made:
        RECORDED.write_text(json.dumps(run(Path(made) / "run"), indent=0) + "\n")

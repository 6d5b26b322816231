"""What a prompt that evolves makes of the tiny policy, over three seeds: python -m benchmarks.prompts

Trainer `gepa` with the proposer first_words, since the tiny policy cannot be instructed and cannot reflect; each prompt is rewarded for
the same 256 problems, at temperature 0.3. Held-out accuracy before the first step, without a prompt, and after the last, with the best
one, of the same 512 problems. Ends with 1 where a seed gains less than GAIN. Writes benchmarks/results/prompts.json.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from atropos_core import console
from benchmarks.machine import RESULTS, described

SEEDS = (0, 1, 2)
GAIN = 0.05
DEADLINE_S = 3600
PROBLEMS = 256
RUN_FILE = f"""
[environment.gsm8k]
use = "prompted"
environment = {{ use = "gsm8k", problems = {PROBLEMS} }}
separator = " "

[trainer]
use = "gepa"
proposer = "first_words"

[bridge]
use = "prompt"

[transform.drop_flat]
use = "none"

[transform.group_advantage]
baseline = "none"

[sampling]
temperature = 0.3

[training]
groups_per_step = {PROBLEMS}
group_size = 1
max_logprob_diff = 1e-3  # a temperature of 0.3 makes three times of the rounding of logits

[health.frozen_weights]
action = "off"
"""


def trained(folder: Path, seed: int, steps: int) -> dict[str, Any]:
    """One run: accuracy before and after, and the prompt that was taken."""
    run_file, run = folder / f"{seed}.toml", folder / f"run-{seed}"
    run_file.write_text(RUN_FILE)
    command = [
        sys.executable, "-m", "atropos_core", "run", str(run_file), "--seed", str(seed), "--steps", str(steps), "--dir", str(run)
    ]  # fmt: skip
    subprocess.run(command, check=True, timeout=DEADLINE_S, env={**os.environ, "HF_HUB_OFFLINE": "1"})
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    [policy] = run.glob(f"checkpoints/step-*{steps}/policy")
    return {
        "seed": seed,
        "before": lines[0]["eval/accuracy"],
        "after": lines[-1]["eval/accuracy"],
        "prompt": (policy / "prompt.txt").read_text(),
        "seconds": sum(line["time/step_s"] for line in lines),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=24, help="prompts that are tried")
    wanted = parser.parse_args()
    machine = described()
    with tempfile.TemporaryDirectory() as scratch:
        rows = [trained(Path(scratch), seed, wanted.steps) for seed in SEEDS]
    console.table(
        ("seed", "before", "after", "prompt", "seconds"),
        [
            (str(row["seed"]), f"{row['before']:.1%}", f"{row['after']:.1%}", row["prompt"], f"{row['seconds']:.0f}")
            for row in rows
        ],
    )
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "prompts.json").write_text(json.dumps({"machine": machine, "rows": rows}, indent=1) + "\n")
    raise SystemExit(0 if all(row["after"] - row["before"] >= GAIN for row in rows) else 1)


if __name__ == "__main__":
    main()

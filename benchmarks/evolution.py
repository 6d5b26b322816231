"""What evolution strategies make of the tiny policy, over three seeds: python -m benchmarks.evolution

Trainer `es` on the norms' weights; each member is rewarded for the same 256 problems, at temperature 0.3. Held-out accuracy before
the first step and after the last, of the same 512 problems: the untrained policy is the baseline. Ends with 1 where a seed gains
less than GAIN. Writes benchmarks/results/evolution.json.
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
GAIN = 0.02
DEADLINE_S = 3600
POPULATION = 16
PROBLEMS = 256
RUN_FILE = f"""
[environment.gsm8k]
problems = {PROBLEMS}

[trainer]
use = "es"
population = {POPULATION}
sigma = 0.05
learning_rate = 0.15
parameters = "norm"

[bridge]
use = "checkpoint"

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
"""


def trained(folder: Path, seed: int, generations: int) -> dict[str, Any]:
    """One run: accuracy before and after, and how long it took."""
    run_file, run = folder / f"{seed}.toml", folder / f"run-{seed}"
    run_file.write_text(RUN_FILE)
    steps = str(generations * (POPULATION + 1))
    command = [
        sys.executable, "-m", "atropos_core", "run", str(run_file), "--seed", str(seed), "--steps", steps, "--dir", str(run)
    ]  # fmt: skip
    subprocess.run(command, check=True, timeout=DEADLINE_S, env={**os.environ, "HF_HUB_OFFLINE": "1"})
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {
        "seed": seed,
        "before": lines[0]["eval/accuracy"],
        "after": lines[-1]["eval/accuracy"],
        "steps": len(lines) - 1,
        "seconds": sum(line["time/step_s"] for line in lines),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--generations", type=int, default=5)
    wanted = parser.parse_args()
    machine = described()
    with tempfile.TemporaryDirectory() as scratch:
        rows = [trained(Path(scratch), seed, wanted.generations) for seed in SEEDS]
    console.table(
        ("seed", "before", "after", "steps", "seconds"),
        [
            (
                str(row["seed"]),
                f"{row['before']:.1%}",
                f"{row['after']:.1%}",
                str(row["steps"]),
                f"{row['seconds']:.0f}",
            )
            for row in rows
        ],
    )
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "evolution.json").write_text(json.dumps({"machine": machine, "rows": rows}, indent=1) + "\n")
    raise SystemExit(0 if all(row["after"] - row["before"] >= GAIN for row in rows) else 1)


if __name__ == "__main__":
    main()

"""A pretrained model of 135 million parameters learns from rewards on a CPU, under several seeds.

    python -m benchmarks.real_learning [--model MODEL] [--seeds 3]

Each seed is a run of recipe `laptop-smollm2-135m` (`atropos_recipes.word_sorting` has the task). Held-out accuracy before and after,
of greedy replies, goes into benchmarks/results/real_learning.json, a row for each seed as it ends, and the page of the first seed into
real_learning.html next to it. Ends with 1 if a seed gained less than GAIN.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from atropos_core.rollouts.evaluation_statistics import wilson
from benchmarks.machine import RESULTS, described
from benchmarks.pretrained import add_model, directory

GAIN = 0.25
RUN_S = 7200.0
RECIPE = "recipe:laptop-smollm2-135m"
OUT = RESULTS / "real_learning.json"


def learn(model: Path, seed: int, page: Path | None) -> dict[str, Any]:
    """Train with this seed, and return the figures of before and after."""
    began, load = time.monotonic(), os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        atropos = [sys.executable, "-m", "atropos_core"]
        subprocess.run(
            [*atropos, "run", RECIPE, "--model", str(model), "--seed", str(seed), "--dir", "run"],
            cwd=folder, check=True, timeout=RUN_S, stdout=subprocess.DEVNULL,
        )  # fmt: skip
        seconds = round(time.monotonic() - began)
        metrics = [json.loads(line) for line in (folder / "run/metrics.jsonl").read_text().splitlines()]
        if page is not None:
            subprocess.run(
                [*atropos, "view", "run", "--html", str(page), "--html-mb", "1", "--force"],
                cwd=folder, check=True, timeout=600, stdout=subprocess.DEVNULL,
            )  # fmt: skip
    return {
        "seed": seed,
        "load_before": round(load, 1),
        "load_after": round(os.getloadavg()[0], 1),
        "seconds": seconds,
    } | figures(metrics)


def figures(metrics: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return accuracy with its 95 % interval and the share of replies that name a kind, before and after; and the mean reward of
    each step."""
    evaluated = [row for row in metrics if "eval/accuracy" in row]
    sides = {}
    for name, row in (("before", evaluated[0]), ("after", evaluated[-1])):
        accuracy, problems = row["eval/accuracy"], int(row["eval/problems"])
        sides[name] = {
            "accuracy": round(accuracy, 4),
            "interval": [round(end, 3) for end in wilson(accuracy, problems)],
            "answered": round(row["eval/answered"], 4),
            "failed": row["eval/failed"],
            "problems": problems,
        }
    trained = [row for row in metrics if "reward/mean" in row]
    return {
        **sides,
        "steps": len(trained),
        "step_s": [round(row["time/step_s"], 1) for row in trained],
        "rewards": [round(row["reward/mean"], 3) for row in trained],
    }


def record(learned: Sequence[Mapping[str, Any]]) -> float:
    """Write the rows with the least gain of a seed, and return it."""
    least: float = min(row["after"]["accuracy"] - row["before"]["accuracy"] for row in learned)
    found = {
        **described(),
        "model": "SmolLM2-135M-Instruct",
        "chance": 0.25,
        "least_gain": round(least, 3),
        "rows": learned,
    }
    OUT.write_text(json.dumps(found, indent=1) + "\n")
    return least


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_model(parser)
    parser.add_argument("--seeds", type=int, default=3)
    given = parser.parse_args()
    model = directory(given.model)
    learned: list[dict[str, Any]] = []
    least = 0.0
    for seed in range(given.seeds):
        learned.append(learn(model, seed, OUT.with_suffix(".html") if seed == 0 else None))
        print(learned[-1], flush=True)
        least = record(learned)
    return int(least < GAIN)


if __name__ == "__main__":
    sys.exit(main())

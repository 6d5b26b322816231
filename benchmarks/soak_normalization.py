"""What `zscore` does for a run of two environments whose rewards have different units: python -m benchmarks.soak_normalization

Half of the tasks are `gsm8k`, right or wrong (0 or 1). The other half are marked from 0 to 100 by a judge that knows
nothing (benchmarks/judged_gsm8k.py). Advantages are not divided by the group's deviation (Dr.GRPO), so without `zscore` the
judge's noise is a hundred times as loud as the task. Three kinds of run from each seed: without `zscore`, with it per
environment, and, to compare, with neither but divided advantages (GRPO). Holds where held-out accuracy with `zscore` is above that
without it: the bootstrap 95 % interval of the mean difference over the seeds begins above 0.

Then ten million samples into the running statistics, eight at a time as groups come, against the exact answer and their memory.
Writes benchmarks/results/soak_normalization.json; half an hour for eight seeds on two idle cores. Ends with 1 where something
did not hold.
"""

from __future__ import annotations

import argparse
import json
import secrets
import tempfile
import time
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np

from atropos_core import console
from atropos_normalization.moments import Moments
from benchmarks.bootstrap import interval
from benchmarks.machine import RESULTS, described
from tests.conftest import metrics_of
from tests.e2e.runs import finish

MIXED = """
model = "tiny"
[environment.gsm8k]
[environment.judged]
use = "benchmarks.judged_gsm8k:JudgedGsm8k"
seed = 1
"""
TRANSFORMS = {
    "plain": "[transform.group_advantage]\ndivide_by_std = false\n[transform.drop_flat]\n",
    "zscore": "[transform.zscore]\n[transform.group_advantage]\ndivide_by_std = false\n[transform.drop_flat]\n",
    "divided": "[transform.group_advantage]\n[transform.drop_flat]\n",
}
UPDATES = 10_000_000
GROUP = 8
OFFSET = 1e6
DEADLINE_S = 1800


def trained(kind: str, seed: int, steps: int, folder: Path) -> dict[str, float]:
    file = folder / f"{kind}-{seed}.toml"
    file.write_text(MIXED + TRANSFORMS[kind])
    run = folder / f"{kind}-{seed}"
    began = time.monotonic()
    finish(run, "run", str(file), "--dir", str(run), "--seed", str(seed), "--steps", str(steps), deadline_s=DEADLINE_S)
    first, *_, last = metrics_of(run)
    zscore = {name.removeprefix("transform/zscore/"): value for name, value in last.items() if "/zscore/" in name}
    accuracies = {"before": first["eval/accuracy"], "after": last["eval/accuracy"], "problems": last["eval/problems"]}
    return accuracies | {"seconds": time.monotonic() - began} | zscore


def counted() -> dict[str, float]:
    """A group at a time, of a stream whose mean and variance are known: OFFSET + 0, 1, 2, ... 999, over and over."""
    moments = Moments()
    groups = OFFSET + np.arange(1000.0).reshape(-1, GROUP)
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    began = time.perf_counter()
    for number in range(0, UPDATES, GROUP):
        moments = moments.then(groups[number % 1000 // GROUP])
    seconds = time.perf_counter() - began
    after, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    variance = (1000**2 - 1) / 12 * UPDATES / (UPDATES - 1)
    return {
        "samples": moments.count,
        "seconds": seconds,
        "mean_error": abs(moments.mean - (OFFSET + 499.5)) / OFFSET,
        "variance_error": abs(moments.variance / variance - 1),
        "memory_grew_bytes": after - before,
        "memory_peak_bytes": peak,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--skip-updates", action="store_true", help="only the runs")
    wanted = parser.parse_args()
    result: dict[str, Any] = {"machine": described(), "steps": wanted.steps, "runs": []}
    with tempfile.TemporaryDirectory(prefix="atropos-soak-") as scratch:
        for number in range(wanted.seeds):
            seed = secrets.randbelow(2**31)
            runs = {kind: trained(kind, seed, wanted.steps, Path(scratch)) for kind in TRANSFORMS}
            result["runs"].append({"seed": seed, **runs})
            gains = {kind: f"{100 * (one['after'] - one['before']):+.1f}" for kind, one in runs.items()}
            console.say(f"seed {number + 1}/{wanted.seeds}: points gained {gains}")
    holds: dict[str, bool] = {}
    if result["runs"]:
        better = [100 * (one["zscore"]["after"] - one["plain"]["after"]) for one in result["runs"]]
        low, high = interval(better)
        result["better_points"] = {"mean": float(np.mean(better)), "low": low, "high": high}
        holds[f"with zscore {np.mean(better):+.1f} points [{low:+.1f}, {high:+.1f}] over without: above 0"] = low > 0
    if not wanted.skip_updates:
        result["updates"] = counted()
        holds["ten million samples: the mean to 1e-12, the variance to 1e-9"] = (
            result["updates"]["mean_error"] < 1e-12 and result["updates"]["variance_error"] < 1e-9
        )
        holds["ten million samples: memory grows by less than 10 kB"] = result["updates"]["memory_grew_bytes"] < 10_000
    result["holds"] = holds
    console.table(("", "holds"), [(claim, "yes" if holds_up else "NO") for claim, holds_up in holds.items()])
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "soak_normalization.json").write_text(json.dumps(result, indent=1) + "\n")
    raise SystemExit(0 if all(holds.values()) else 1)


if __name__ == "__main__":
    main()

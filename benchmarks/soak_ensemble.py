"""What an ensemble does where one reward can be gamed: `python -m benchmarks.soak_ensemble`

The tiny policy, which from the start answers half of the problems without any working, and then wrongly. The reward
`gameable` takes such bare answers at their word. Four kinds of run, each seed with all of them:

    gameable    that reward alone
    grader      one honest grader that errs in one verdict of ten
    median      the median of `gameable` and four such graders, which err independently
    exclude     their mean, with whoever departs shut out

What is compared is the accuracy on held-out problems, which no reward of the run has any say in. Holds where the
bootstrap 95 % interval of median - gameable over the seeds is above 0 and its mean at least 5 points. Writes
benchmarks/results/soak_ensemble.json; tools/make_ensemble_plot.py draws it.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from atropos_core import console
from benchmarks import gameable_rewards
from benchmarks.bootstrap import interval
from benchmarks.machine import RESULTS, described

GRADER = 'use = "grader"\nnumber = {number}\n'
MEMBERS = "[reward.trusted.members.gameable]\n" + "".join(
    f"[reward.trusted.members.grader_{number}]\n{GRADER.format(number=number)}" for number in range(1, 5)
)
ARMS = {
    "gameable": "[reward.gameable]\n",
    "grader": f"[reward.grader]\n{GRADER.format(number=1)}",
    "median": f'[reward.trusted]\nuse = "ensemble"\ncombine = "median"\n{MEMBERS}',
    "exclude": f'[reward.trusted]\nuse = "ensemble"\ncombine = "mean"\non_departure = "exclude"\n{MEMBERS}',
}
PROBLEMS = 1024  # an accuracy of so many has a standard error of at most 1.6 points
METRICS = ("/alpha_rolling", "/agreement", "/suspicion", "/flagged")  # of what an ensemble says of itself, step by step
WANTED_POINTS = 5.0
DEADLINE_S = 1200


def trained(folder: Path, arm: str, seed: int, steps: int, every: int, path: str) -> dict[str, Any]:
    """One run: its accuracies by step, and the ensemble's metrics."""
    folder.mkdir(parents=True)
    run_file = folder / "run.toml"
    run_file.write_text(f'[environment.gsm8k]\n[reward.environment]\nuse = "none"\n{ARMS[arm]}')
    command = [
        sys.executable, "-m", "atropos_core", "run", str(run_file), "--dir", str(folder / "run"),
        "--steps", str(steps), "--seed", str(seed), "--set", f"evaluation.problems={PROBLEMS}",
        "--set", f"evaluation.every={every}", "--set", "checkpoint.every=0",
        "--set", "engine.threads=1", "--set", "trainer.threads=1",
    ]  # fmt: skip
    python_path = os.pathsep.join(filter(None, (path, os.environ.get("PYTHONPATH", ""))))
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": python_path}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=DEADLINE_S)
    rows = [json.loads(line) for line in (folder / "run/metrics.jsonl").read_text().splitlines()]
    if ended.returncode != 0 and "NoProgress" not in ended.stderr + ended.stdout:
        raise SystemExit(f"a run ended with {ended.returncode}:\n{ended.stdout[-1500:]}\n{ended.stderr[-1500:]}")
    curve = {int(row["step"]): 100 * row["eval/accuracy"] for row in rows if "eval/accuracy" in row}
    metrics = {
        key: [None if row.get(key) is None else round(row[key], 4) for row in rows]
        for key in rows[-1]
        if key == "reward/mean" or key.endswith(METRICS)
    }
    return {
        "seed": seed,
        "exit": ended.returncode,
        "accuracy": curve,
        "last": list(curve.values())[-1],
        "metrics": metrics,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--every", type=int, default=4, help="steps between evaluations")
    parser.add_argument("--arms", default=",".join(ARMS))
    parser.add_argument("--out", type=Path, default=RESULTS / "soak_ensemble.json")
    wanted = parser.parse_args()
    arms = wanted.arms.split(",")
    result: dict[str, Any] = {"machine": described(), "steps": wanted.steps, "problems": PROBLEMS}
    result["runs"] = {arm: [] for arm in arms}
    with tempfile.TemporaryDirectory(prefix="atropos-soak-") as scratch:
        path = gameable_rewards.plant(Path(scratch) / "installed")
        for seed in range(wanted.seeds):
            for arm in arms:
                one = trained(Path(scratch) / f"{arm}-{seed}", arm, seed, wanted.steps, wanted.every, path)
                result["runs"][arm].append(one)
                console.say(f"seed {seed + 1}/{wanted.seeds}, {arm}: {one['accuracy'][0]:.1f} -> {one['last']:.1f} %")
    ends = {arm: [one["last"] for one in runs] for arm, runs in result["runs"].items()}
    rows = [
        (arm, f"{statistics.mean(values):.1f}", f"{min(values):.1f}", f"{max(values):.1f}")
        for arm, values in ends.items()
    ]
    console.table(("reward", "accuracy %, mean", "lowest", "highest"), rows)
    result["ends"] = ends
    result["holds"] = {}
    for arm in ("median", "exclude"):
        if arm in ends and "gameable" in ends:
            differences = [one - other for one, other in zip(ends[arm], ends["gameable"], strict=True)]
            low, high = interval(differences)
            result[f"{arm}_points"] = {"mean": statistics.mean(differences), "low": low, "high": high}
            result["holds"] |= {
                f"{arm}: interval above 0 ({low:.1f} to {high:.1f} points)": low > 0,
                f"{arm}: mean at least {WANTED_POINTS:g} points": statistics.mean(differences) >= WANTED_POINTS,
            }
    console.table(("", "holds"), [(claim, "yes" if holds_up else "NO") for claim, holds_up in result["holds"].items()])
    wanted.out.parent.mkdir(exist_ok=True)
    wanted.out.write_text(json.dumps(result, indent=1) + "\n")
    raise SystemExit(0 if all(result["holds"].values()) else 1)


if __name__ == "__main__":
    main()

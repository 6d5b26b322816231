"""Steps to an accuracy with an outcome reward only, and with the same score as turn rewards: python -m benchmarks.turn_learning

An episode is four word problems of `calculator` in a row (benchmarks/problems_in_a_row.py), its score the share that was answered right.
`tiny-tools` learns it in three ways, from the same weights and seeds, with the same transform and the same tasks in each step:

    outcome    the whole score is earned at the end
    turns      each problem's part is placed at the reply that answered it
    discount   the same, and later turns count half as much (discount = 0.5): here no problem depends on an earlier one

Before the first step and after every second one, held-out problems are sampled at temperature 1. The three runs of a seed run at the same
time, and steps are counted and not seconds, so the machine's load does not matter. Writes benchmarks/results/turn_learning.json.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from atropos_core import console
from benchmarks.machine import RESULTS, described
from tests.conftest import metrics_of
from tests.e2e.runs import finish

ARMS = {
    "outcome": ("AtTheEnd", ""),
    "turns": ("AtTheTurns", ""),
    "discount": ("AtTheTurns", "discount = 0.5"),
}
RUN = """
model = "tiny-tools"
[training]
groups_per_step = 4
group_size = 8
[environment.problems]
use = "benchmarks.problems_in_a_row:{environment}"
[transform.turn_returns]
baseline = "state"
{options}
[transform.group_advantage]
use = "none"
[transform.drop_flat]
[trainer]
loss = "reinforce"
learning_rate = 2e-4
[evaluation]
problems = {episodes}
every = 2
temperature = 1.0
[checkpoint]
every = 1000
"""
EPISODES = 40  # of an evaluation, four problems each
MARKS = (0.5, 0.6, 0.7)  # held-out accuracy, from about 0.35
DEADLINE_S = 900


def learnt(arm: str, seed: int, steps: int, folder: Path) -> dict[str, Any]:
    """Return the held-out accuracy by step of one run."""
    environment, options = ARMS[arm]
    file, run = folder / f"{arm}-{seed}.toml", folder / f"{arm}-{seed}"
    file.write_text(RUN.format(environment=environment, options=options, episodes=EPISODES))
    began = time.monotonic()
    finish(run, "run", str(file), "--dir", str(run), "--seed", str(seed), "--steps", str(steps), deadline_s=DEADLINE_S)
    lines = metrics_of(run)
    return {
        "accuracy": {str(line["step"]): line["eval/problems/right"] for line in lines if "eval/problems/right" in line},
        "sampled": [line["problems/right"] for line in lines if line["step"]],
        "turns": [line["transform/turn_returns/turns"] for line in lines if line["step"]],
        "seconds": time.monotonic() - began,
    }


def steps_to(mark: float, accuracy: dict[str, float]) -> int | None:
    """Return the first evaluated step with at least this accuracy; None if there is none."""
    return next((int(step) for step, share in accuracy.items() if share >= mark), None)


def summary(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return of each arm: steps to each mark by seed, and the mean accuracy over all evaluations after the first."""
    made = {}
    for arm in ARMS:
        curves = [run[arm]["accuracy"] for run in runs]
        made[arm] = {
            "steps_to": {str(mark): [steps_to(mark, curve) for curve in curves] for mark in MARKS},
            "mean": [statistics.mean(list(curve.values())[1:]) for curve in curves],
            "last": [list(curve.values())[-1] for curve in curves],
        }
    return made


def rows(found: dict[str, Any], steps: int) -> list[Sequence[str]]:
    """Return the table's rows. A seed that does not reach a mark counts as more than the last step."""
    made: list[Sequence[str]] = []
    for arm, of in found.items():
        for mark, reached in of["steps_to"].items():
            counted = [step if step is not None else steps + 1 for step in reached]
            middle = statistics.median(counted)
            cells = ["-" if step is None else str(step) for step in reached]
            made.append(
                (
                    arm,
                    f"steps to {100 * float(mark):.0f} %",
                    *cells,
                    f"{middle:g}" if middle <= steps else "-",
                    _spread(cells),
                )
            )
        for name, label in (("mean", "mean over the run, %"), ("last", "after the last step, %")):
            shares = [f"{100 * share:.1f}" for share in of[name]]
            made.append((arm, label, *shares, f"{100 * statistics.median(of[name]):.1f}", _spread(shares)))
    return made


def _spread(cells: Sequence[str]) -> str:
    ordered = sorted(cells, key=lambda cell: float("inf") if cell == "-" else float(cell))
    return f"{ordered[0]} to {ordered[-1]}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=14)
    wanted = parser.parse_args()
    result: dict[str, Any] = {"machine": described(), "steps": wanted.steps, "episodes": EPISODES, "runs": []}
    with tempfile.TemporaryDirectory(prefix="atropos-turns-") as scratch, ThreadPoolExecutor(len(ARMS)) as together:
        for seed in range(wanted.seeds):
            started = {arm: together.submit(learnt, arm, seed, wanted.steps, Path(scratch)) for arm in ARMS}
            result["runs"].append({"seed": seed, **{arm: one.result() for arm, one in started.items()}})
            console.say(
                f"seed {seed}: " + ", ".join(f"{arm} {one.result()['seconds']:.0f} s" for arm, one in started.items())
            )
    result["summary"] = summary(result["runs"])
    seeds = [f"seed {run['seed']}" for run in result["runs"]]
    console.table(("arm", "", *seeds, "median", "spread"), rows(result["summary"], wanted.steps))
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "turn_learning.json").write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()

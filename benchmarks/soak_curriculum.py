"""Rollouts that the tiny policy needs to reach an accuracy, where most tasks teach nothing: python -m benchmarks.soak_curriculum

The environment is benchmarks/mixed_gsm8k.py: of five tasks, three that no reply solves, one that any reply does, and one of
gsm8k's own. Each seed trains with `shuffled` and with each curriculum, which get the kind of a task as a prior, not
what it means. Accuracy is that of gsm8k's held-out problems, looked at every few steps; the crossing is interpolated between two looks, and
a run that never crosses counts as all its rollouts. The share of rollouts saved is averaged over seeds; the interval is a
bootstrap over them. Ends with 1 where it is above 0 for no curriculum. Writes benchmarks/results/soak_curriculum.json.

    python -m benchmarks.soak_curriculum --seeds 1 --steps 40 --curricula window    # a look at it: some minutes
"""

from __future__ import annotations

import argparse
import itertools
import json
import secrets
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from atropos_core import console
from benchmarks.bootstrap import interval
from benchmarks.machine import RESULTS, described
from tests.e2e.runs import finish

ENVIRONMENT = "benchmarks.mixed_gsm8k:MixedGsm8k"
PRIOR = '[curriculum.prior]\nfield = "kind"\n'
GROUPS, GROUP, EVERY, PROBLEMS = 16, 8, 2, 512
DEADLINE_S = 1800


def trained(curriculum: str, seed: int, steps: int, folder: Path) -> dict[str, Any]:
    """One run: accuracy by rollouts, and what share of its groups taught something."""
    folder.mkdir()
    run_file, run = folder / "run.toml", folder / "run"
    prior = "" if curriculum == "shuffled" else PRIOR
    run_file.write_text(f'[environment.mixed]\nuse = "{ENVIRONMENT}"\n[curriculum]\nuse = "{curriculum}"\n{prior}')
    finish(
        run, "run", str(run_file), "--dir", str(run), "--seed", str(seed), "--steps", str(steps),
        "--set", f"training.groups_per_step={GROUPS}", "--set", f"training.group_size={GROUP}",
        "--set", f"evaluation.every={EVERY}", "--set", f"evaluation.problems={PROBLEMS}", "--set", "checkpoint.every=0",
        deadline_s=DEADLINE_S,
    )  # fmt: skip
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    rollouts, curve = 0.0, []
    for row in rows:
        rollouts += row.get("rollouts/count", 0.0) if row["step"] else 0.0
        if "eval/accuracy" in row:
            curve.append((rollouts, row["eval/accuracy"]))
    kept = sum(row.get("groups/trained", 0.0) for row in rows[1:]) / (GROUPS * (len(rows) - 1))
    return {"curve": curve, "trained_share": kept}


def rollouts_to(curve: Sequence[tuple[float, float]], accuracy: float) -> float:
    """Interpolated between the two looks around the first crossing; the last look's where there is none."""
    for (before, low), (after, high) in itertools.pairwise(curve):
        if high >= accuracy > low:
            return before + (after - before) * (accuracy - low) / (high - low)
    return curve[0][0] if curve[0][1] >= accuracy else curve[-1][0]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--accuracy", type=float, default=0.6)
    parser.add_argument("--curricula", default="window,prioritized")
    wanted = parser.parse_args(arguments)
    curricula = ("shuffled", *wanted.curricula.split(","))
    seeds: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="atropos-curriculum-") as place:
        for number in range(wanted.seeds):
            seed = secrets.randbelow(2**31)
            runs = {name: trained(name, seed, wanted.steps, Path(place) / f"{name}-{number}") for name in curricula}
            for run in runs.values():
                run["rollouts"] = rollouts_to(run["curve"], wanted.accuracy)
            seeds.append({"seed": seed, "runs": runs})
            console.say(f"seed {number + 1}/{wanted.seeds}: " + ", ".join(
                f"{name} {run['rollouts']:.0f} rollouts, {100 * run['curve'][-1][1]:.1f} % at the end, "
                f"{100 * run['trained_share']:.0f} % of groups trained" for name, run in runs.items()))  # fmt: skip
    saved, rows = {}, []
    for name in curricula:
        needed = [one["runs"][name]["rollouts"] for one in seeds]
        shares = [1 - one["runs"][name]["rollouts"] / one["runs"]["shuffled"]["rollouts"] for one in seeds]
        low, high = interval(shares)
        if name != "shuffled":
            saved[name] = {"mean": statistics.mean(shares), "low": low, "high": high}
        rows.append((
            name, f"{statistics.mean(needed):.0f}", f"{100 * statistics.mean(shares):.0f} %", f"{100 * low:.0f} to {100 * high:.0f} %",
            f"{100 * statistics.mean(one['runs'][name]['curve'][-1][1] for one in seeds):.1f} %",
            f"{100 * statistics.mean(one['runs'][name]['trained_share'] for one in seeds):.0f} %",
        ))  # fmt: skip
    heads = (
        f"rollouts to {100 * wanted.accuracy:.0f} %",
        "saved",
        "95 % interval",
        "accuracy at the end",
        "groups trained",
    )
    console.table(("curriculum", *heads), rows)
    holds = any(of["low"] > 0 for of in saved.values())
    result = {
        "machine": described(),
        "accuracy": wanted.accuracy,
        "steps": wanted.steps,
        "saved": saved,
        "seeds": seeds,
    }
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "soak_curriculum.json").write_text(json.dumps(result | {"holds": holds}, indent=1) + "\n")
    raise SystemExit(0 if holds else 1)


if __name__ == "__main__":
    main()

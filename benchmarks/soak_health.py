"""Health on sick and healthy runs, and what looking costs: `make soak`, or python -m benchmarks.soak_health.

Twenty planted illnesses, each with several seeds, must be named within five steps and not before they begin; ten seeds of
the tiny policy, and ten of the toy, must raise no alarm. Writes benchmarks/results/soak_health.json with the commit.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from atropos_core import console
from benchmarks.machine import RESULTS, described
from tests.e2e.sick_runs import SICK, rows, run_sick, verdict

HEALTHY = ("--env", "gsm8k", "--set", "evaluation.problems=64")
DEADLINE_S = 3600
MOST = 0.01  # of the time of a step, for health


def sick(seeds: int, folder: Path) -> list[dict[str, Any]]:
    found = []
    for name in SICK:
        for seed in range(seeds):
            run, _ = run_sick(name, folder / f"{name.replace(' ', '_')}-{seed}", seed=seed)
            found.append({"seed": seed, **verdict(name, run)})
            console.say(f"{name}, seed {seed}: {found[-1]}")
    return found


def healthy(kind: str, seed: int, steps: int, folder: Path) -> dict[str, Any]:
    """One run that nobody tampered with: its alarms, and what health took of its steps."""
    if kind == "toy":
        run, ended = run_sick("nothing", folder / f"toy-{seed}", seed=seed, more="health.rescore_every = 1")
    else:
        run = folder / f"tiny-{seed}"
        ended = subprocess.run(
            [sys.executable, "-m", "atropos_core", "run", "--dir", str(run), "--seed", str(seed), "--steps", str(steps), *HEALTHY],
            capture_output=True, text=True, timeout=DEADLINE_S,
        )  # fmt: skip
    if ended.returncode:
        raise SystemExit(ended.stdout + ended.stderr)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    lines = [line for line in lines if line["step"] > 1]  # the time of a step's health is in the metrics of the next
    alarms = [row for row in rows(run) if row["state"] == "ill"]
    share = sum(line["time/health_s"] for line in lines) / sum(line["time/step_s"] for line in lines)
    return {
        "kind": kind,
        "seed": seed,
        "steps": len(lines) + 1,
        "alarms": alarms,
        "suspect": sorted({row["check"] for row in rows(run) if row["state"] == "suspect"}),
        "entropy_least": min(line["entropy/sampled"] for line in lines),
        "health_share": share,
        "held": not alarms
        and (kind == "toy" or share < MOST),  # a toy's step is a few milliseconds, and all is rescored
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3, help="of each sick run")
    parser.add_argument("--healthy", type=int, default=10)
    parser.add_argument("--steps", type=int, default=100, help="of a healthy tiny run")
    chosen = parser.parse_args()
    about = described()
    with tempfile.TemporaryDirectory() as folder:
        ill = sick(chosen.seeds, Path(folder))
        well = []
        for kind in ("toy", "tiny"):
            for seed in range(chosen.healthy):
                well.append(healthy(kind, seed, chosen.steps, Path(folder)))
                console.say(str(well[-1]))
    table = [
        (one["sickness"], one["seed"], one["check"], one["named_at"], ", ".join(one["also"]), one["held"])
        for one in ill
    ]
    console.table(("sick run", "seed", "check", "named at step", "also", "held"), table)
    healthy_table = [
        (
            one["kind"],
            one["seed"],
            len(one["alarms"]),
            ", ".join(one["suspect"]),
            f"{one['health_share']:.3%}",
            one["held"],
        )
        for one in well
    ]
    console.table(("healthy run", "seed", "alarms", "suspect", "health's share of a step", "held"), healthy_table)
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "soak_health.json").write_text(json.dumps({**about, "sick": ill, "healthy": well}, indent=1) + "\n")
    failed = [one for one in (*ill, *well) if not one["held"]]
    if failed:
        raise SystemExit(f"{len(failed)} did not hold: {failed}")


if __name__ == "__main__":
    main()

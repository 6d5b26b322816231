"""What health and profiling cost of a step: python -m benchmarks.observing.

Health is a stage of the profile, so the run itself says what it took. A span of the profile costs the same whatever it
measures: its cost is measured alone, best of five, and multiplied by how many the run made. Writes
benchmarks/results/observing.json.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from time import perf_counter
from typing import Any

from atropos_core import console
from atropos_core.observe.profile import Profile
from benchmarks.machine import RESULTS, described
from tests.e2e.sick_runs import command, plant_once

SPANS = 20_000
MOST = 0.01  # of the time of a step
TOY = (
    "run",
    "--model",
    "toy",
    "--env",
    "sick_letters",
    "--steps",
    "60",
    "--dir",
    "toy",
    "--set",
    "sampling.max_tokens=32",
)
ONCE = ("start-up", "evaluation", "checkpoint")


def span_s() -> float:
    """Of one span, and of its share of a step's metrics."""
    best = float("inf")
    for _ in range(5):
        profile = Profile()
        start = perf_counter()
        for _ in range(SPANS):
            with profile.call("engine/sample", 1):
                pass
        best = min(best, (perf_counter() - start) / SPANS)
    return best


def step_s(names: int) -> float:
    """Of the metrics of a step with so many names."""
    profile = Profile()
    for number in range(names):
        profile.add(f"stage-{number}", 0.001)
    start = perf_counter()
    for _ in range(1000):
        profile.step()
    return (perf_counter() - start) / 1000


def measured(kind: str, run: Path, one_span_s: float) -> dict[str, Any]:
    summary = json.loads((run / "summary.json").read_text())
    steps = summary["steps"]
    spans = sum(row["calls"] for row in summary["times"])
    stepping_s = sum(s for name, s in summary["seconds"].items() if name not in ONCE)
    profile_s = spans * one_span_s + steps * step_s(len(summary["times"]))
    health_s = summary["seconds"]["health"]
    return {
        "kind": kind,
        "steps": steps,
        "step_s": stepping_s / steps,
        "spans_a_step": spans / steps,
        "health_share": health_s / stepping_s,
        "profile_share": profile_s / stepping_s,
        "share": (health_s + profile_s) / stepping_s,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=30, help="of the tiny run")
    chosen = parser.parse_args()
    about, one = described(), span_s()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        plant_once(folder)
        ended = command(folder, *TOY)
        if ended.returncode:
            raise SystemExit(ended.stdout + ended.stderr)
        tiny = [sys.executable, "-m", "atropos_core", "run", "--env", "gsm8k", "--dir", str(folder / "tiny"),
                   "--steps", str(chosen.steps), "--set", "evaluation.problems=0"]  # fmt: skip
        subprocess.run(tiny, check=True, capture_output=True, timeout=3600)
        found = [measured("toy", folder / "toy", one), measured("tiny", folder / "tiny", one)]
    shares = ("health_share", "profile_share", "share")
    table = [
        (m["kind"], f"{m['step_s']:.3f} s", f"{m['spans_a_step']:.0f}", *(f"{m[key]:.3%}" for key in shares))
        for m in found
    ]
    console.table(("run", "a step", "spans", "health", "profile", "both"), table)
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "observing.json").write_text(json.dumps({**about, "span_us": 1e6 * one, "runs": found}, indent=1) + "\n")
    if any(m["share"] > MOST for m in found):
        raise SystemExit(f"looking costs more than {MOST:.0%} of a step")


if __name__ == "__main__":
    main()

"""`atropos simulate` beside runs: python -m benchmarks.simulation [--real]

Figures are taken from one run alone, strictly on-policy with one engine, and predict the others: two to four engines, and
`max_staleness = 1`. First with an engine, a trainer and an environment whose time is waiting (benchmarks/simulation_parts.py),
since more engines than cores would measure the machine; with --real, the tiny policy with `engine_hf` and `trainer_grpo`, one engine and
two, where trainer and engines share the cores, of which the model knows nothing. Both sides count the steps after the first ones. Writes
benchmarks/results/simulation_waiting.json or simulation_real.json; ends with 1 where a prediction with the waiting parts is more
than 15 % off.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from atropos_core import console
from atropos_simulation.figures import Known
from atropos_simulation.loop_model import ClusterSize, Loop
from atropos_simulation.measured import SKIPPED, from_run
from benchmarks.machine import RESULTS, described

PARTS = "benchmarks.simulation_parts"
WITHIN = 0.15
DEADLINE_S = 900
WAITING_CASES = ((1, 0), (2, 0), (3, 0), (4, 0), (1, 1), (2, 1), (4, 1))  # engines, max_staleness
REAL_CASES = ((1, 0), (2, 0), (1, 1))
SEEDS = 5  # simulations, of which the mean is the prediction
WAITING = (
    "--model", "toy", "--env", f"{PARTS}:WaitingTasks", "--engine", f"{PARTS}:WaitingEngine", "--trainer", f"{PARTS}:WaitingTrainer",
    "--bridge", "local", "--set", "training.groups_per_step=8", "--set", "training.group_size=4", "--set", "sampling.max_tokens=48",
)  # fmt: skip
REAL = (
    "--env", "gsm8k", "--bridge", "checkpoint", "--set", "training.groups_per_step=16", "--set", "training.group_size=8",
    "--set", "sampling.max_tokens=64", "--set", "engine.threads=1", "--set", "trainer.threads=1", "--set", "trainer.learning_rate=1e-9",
    "--set", "trainer.gradient_checkpointing=true",
)  # fmt: skip


def measured(run: Path, base: Sequence[str], engines: int, staleness: int, steps: int) -> dict[str, float]:
    """Steps of a run that is made in `run`, but for the first ones: what one takes, and trajectories/s."""
    replicas = [word for number in range(1, engines) for word in ("--set", f"engine.replica.r{number}={{}}")]
    command = [
        sys.executable, "-m", "atropos_core", "run", *base, *replicas, "--steps", str(steps), "--dir", str(run),
        "--set", f"training.max_staleness={staleness}", "--set", "evaluation.problems=0", "--set", "checkpoint.every=0",
        "--set", "plot='never'",
    ]  # fmt: skip
    seen: dict[int, float] = {}
    metrics = run / "metrics.jsonl"
    with run.with_suffix(".out").open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, env={**os.environ, "HF_HUB_OFFLINE": "1"})
        try:
            until = time.monotonic() + DEADLINE_S
            while process.poll() is None and time.monotonic() < until:
                seen.setdefault(metrics.read_bytes().count(b"\n") if metrics.exists() else 0, time.perf_counter())
                time.sleep(0.02)
        finally:
            if process.poll() is None:
                process.kill()
            process.wait()
    if process.returncode:
        raise SystemExit(f"a run ended with {process.returncode}:\n{run.with_suffix('.out').read_text()[-3000:]}")
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    seconds = seen[len(rows)] - seen[SKIPPED]
    counted = rows[SKIPPED:]
    return {
        "step_s": seconds / len(counted),
        "trajectories_per_s": sum(row["rollouts/count"] for row in counted) / seconds,
    }


def predicted(known: Known, engines: int, staleness: int, steps: int) -> dict[str, float]:
    figures = Known({"run.max_staleness": staleness}, {"run.max_staleness": "the run"}, {}).over(known).figures()
    found = [Loop(figures, ClusterSize(engines), seed).outcome(steps, SKIPPED) for seed in range(SEEDS)]
    return {
        "step_s": sum(one.step_s for one in found) / SEEDS,
        "trajectories_per_s": sum(one.trajectories_per_s for one in found) / SEEDS,
    }


def compared(
    folder: Path, name: str, base: Sequence[str], cases: Sequence[tuple[int, int]], steps: int, most: int
) -> dict[str, Any]:
    """All cases, the first of which gives the figures."""
    entries: list[dict[str, Any]] = []
    given = {"worker.rollout_s": 0.0, "hub.group_s": 0.0, "engine.max_sequences": most}
    known: Known | None = None
    for engines, staleness in cases:
        run = folder / f"{name}-{engines}-{staleness}"
        took = measured(run, base, engines, staleness, steps)
        if known is None:
            known = Known(given, dict.fromkeys(given, "the loop's own, in the figures of the engine"), {}).over(
                from_run(run)
            )
        forecast = predicted(known, engines, staleness, steps)
        ratio = forecast["trajectories_per_s"] / took["trajectories_per_s"]
        entries.append(
            {"engines": engines, "max_staleness": staleness, "measured": took, "predicted": forecast, "ratio": ratio}
        )
        console.say(
            f"{name}, {engines} engines, max_staleness {staleness}: {took['trajectories_per_s']:.2f} trajectories/s, predicted "
            f"{forecast['trajectories_per_s']:.2f}, ratio {ratio:.3f}"
        )
    assert known is not None
    return {
        "figures": {path: value for path, value in known.values.items() if path != "rollout.tokens"},
        "cases": entries,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--real", action="store_true", help="with the tiny policy, in place of the parts that wait")
    parser.add_argument("--steps", type=int, default=24)
    wanted = parser.parse_args()
    name, base, cases, most = (
        ("real", REAL, REAL_CASES, 256) if wanted.real else ("waiting", WAITING, WAITING_CASES, 4096)
    )
    machine = described()
    with tempfile.TemporaryDirectory(prefix="atropos-simulation-") as folder:
        found = compared(Path(folder), name, base, cases, wanted.steps, most)
    holds = all(abs(one["ratio"] - 1) <= WITHIN for one in found["cases"])
    RESULTS.mkdir(exist_ok=True)
    result = {"machine": machine, "steps": wanted.steps - SKIPPED, "within_15_percent": holds} | found
    (RESULTS / f"simulation_{name}.json").write_text(json.dumps(result, indent=1) + "\n")
    raise SystemExit(0 if holds or wanted.real else 1)


if __name__ == "__main__":
    main()

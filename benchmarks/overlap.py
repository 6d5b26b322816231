"""Trajectories/s where rollouts and training overlap, beside the same run strictly on-policy: python -m benchmarks.overlap

Generation, update and environment latency take about the same time; the table says how long each took. The tiny policy,
`engine_hf` and `trainer_grpo`, one thread each; the latency is a sleep at the end of a rollout, as of a grader or a tool far
away, and as long as generation and update are on average in a first run without it. All groups are trained, at a learning
rate of 1e-9, so that the work of a step stays what it is, with gradient checkpointing, which makes the update about as
long as the generation. The kinds of run alternate, so that a noisy minute hits all of
them. Ends with 1 where `max_staleness = 1` brings less than 1.3 times the trajectories/s. Writes
benchmarks/results/overlap.json.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from atropos_core import console
from benchmarks.machine import RESULTS, described

ENVIRONMENT = "benchmarks.slow_gsm8k:SlowGsm8k"
PROMPTS, GROUP, MAX_TOKENS = 16, 8, 64
SKIP = 5  # steps at the start of each run
STALENESS = (0, 1, 2)
WANTED = 1.3
DEADLINE_S = 1200


def trained(
    folder: Path, latency_s: float, staleness: int, steps: int, *more: str, section: str = ""
) -> dict[str, Any]:
    """One run, and what it says of itself after its first steps. `section` is more of its run file."""
    run_file = folder / "run.toml"
    run_file.write_text(f'[environment.slow]\nuse = "{ENVIRONMENT}"\nlatency_s = {latency_s!r}\n{section}')
    run = folder / "run"
    command = [
        sys.executable, "-m", "atropos_core", "run", str(run_file), "--dir", str(run), "--steps", str(steps),
        "--set", f"training.groups_per_step={PROMPTS}", "--set", f"training.group_size={GROUP}",
        "--set", f"training.max_staleness={staleness}", "--set", f"sampling.max_tokens={MAX_TOKENS}",
        "--set", "engine.threads=1", "--set", "trainer.threads=1", *more,
    ]  # fmt: skip
    seen: dict[int, float] = {}
    with (folder / "out").open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, env={**os.environ, "HF_HUB_OFFLINE": "1"})
        try:
            metrics = run / "metrics.jsonl"
            until = time.monotonic() + DEADLINE_S
            while process.poll() is None and time.monotonic() < until:
                lines = metrics.read_bytes().count(b"\n") if metrics.exists() else 0
                seen.setdefault(lines, time.perf_counter())
                time.sleep(0.005)
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
    if process.returncode != 0:
        raise SystemExit(f"a run ended with {process.returncode}:\n{(folder / 'out').read_text()[-3000:]}")
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    first = len(rows) - steps  # 1 where the run evaluates before its first step
    counted = [row for row in rows if row["step"] > SKIP]
    seconds = seen[len(rows)] - seen[SKIP + first]
    return {
        "max_staleness": staleness,
        "trajectories_per_s": sum(row["rollouts/count"] for row in counted) / seconds,
        "step_s": seconds / len(counted),
        "rollouts_s": statistics.mean(row["time/rollouts_s"] for row in counted),
        "update_s": statistics.mean(row["time/training_s"] for row in counted),
        "staleness_mean": statistics.mean(row.get("staleness/mean", 0.0) for row in counted),
        "staleness_max": max(row.get("staleness/max", 0.0) for row in counted),
        "groups_stale": sum(row["groups/stale"] for row in counted),
        "publish_s": statistics.mean(row["bridge/publish_s"] for row in counted),
        "tokens_mean": statistics.mean(row["tokens/mean"] for row in counted),
        "accuracy": rows[-1].get("eval/accuracy"),
    }


STILL = (
    "--set",
    "trainer.learning_rate=1e-9",
    "--set",
    "evaluation.problems=0",
    "--set",
    "checkpoint.every=0",
    "--set",
    "trainer.gradient_checkpointing=true",
)
ALL_GROUPS = '[transform.drop_flat]\nuse = "none"\n'


def measured(latency_s: float, staleness: int, steps: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="atropos-overlap-") as folder:
        return trained(Path(folder), latency_s, staleness, steps, *STILL, section=ALL_GROUPS)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=35)
    parser.add_argument("--repetitions", type=int, default=3)
    wanted = parser.parse_args(arguments)
    alone = measured(0.0, 0, wanted.steps)
    generation, update = alone["rollouts_s"], alone["update_s"]
    latency = (generation + update) / 2
    runs: dict[int, list[dict[str, Any]]] = {staleness: [] for staleness in STALENESS}
    for _ in range(wanted.repetitions):
        for staleness, entries in runs.items():
            entries.append(measured(latency, staleness, wanted.steps))
    rates = {
        staleness: statistics.median(entry["trajectories_per_s"] for entry in entries)
        for staleness, entries in runs.items()
    }
    console.table(
        ("max_staleness", "trajectories/s", "times on-policy", "step s", "behind, mean", "at most", "dropped as stale"),
        [
            (
                str(staleness),
                f"{rates[staleness]:.0f}",
                f"{rates[staleness] / rates[0]:.2f}",
                f"{statistics.median(entry['step_s'] for entry in entries):.2f}",
                f"{statistics.mean(entry['staleness_mean'] for entry in entries):.2f}",
                f"{max(entry['staleness_max'] for entry in entries):.0f}",
                f"{sum(entry['groups_stale'] for entry in entries):.0f}",
            )
            for staleness, entries in runs.items()
        ],
    )
    console.say(
        f"generation : update : environment latency = {generation:.2f} : {update:.2f} : {latency:.2f} s = "
        f"1 : {update / generation:.2f} : {latency / generation:.2f}"
    )
    result = {
        "machine": described(),
        "generation_s": generation,
        "update_s": update,
        "latency_s": latency,
        "steps": wanted.steps - SKIP,
        "runs": runs,
        "trajectories_per_s": rates,
        "ratio": rates[1] / rates[0],
        "holds": rates[1] / rates[0] >= WANTED,
    }
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "overlap.json").write_text(json.dumps(result, indent=1) + "\n")
    raise SystemExit(0 if result["holds"] else 1)


if __name__ == "__main__":
    main()

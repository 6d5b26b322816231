"""Trajectories/s of the whole loop beside TRL's GRPOTrainer: `make bench`, or python -m benchmarks.quickstart.

Both train the tiny policy on the same generated problems, 16 tasks x 8 rollouts a step, float32, the same limit on new tokens, at
a learning rate of 1e-9, so that the policy, and with it the lengths of its replies, stay what they are. Start-up and the first
steps are left out. Atropos takes as many threads as it takes by itself; TRL gets two batch sizes, each with one thread and with every
core, and its best counts.
Writes benchmarks/results/quickstart.json.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from atropos_core import console
from benchmarks.machine import RESULTS, described

STEPS, SKIP = 30, 6
PROMPTS, GROUP, MAX_TOKENS = 16, 8, 64
RATE = 1e-9
BATCHES = (64, 128)
REPETITIONS = 2
THREADS = (1, len(os.sched_getaffinity(0)))  # of TRL
DEADLINE_S = 600
TRL = Path(".venv-trl/bin/python")


def ours(run_file: str = "") -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        (Path(folder) / "run.toml").write_text(run_file)
        metrics = run / "metrics.jsonl"
        process = subprocess.Popen(
            [
                sys.executable, "-m", "atropos_core", "run", str(Path(folder) / "run.toml"), "--env", "gsm8k",
                "--dir", str(run), "--steps", str(STEPS),
                "--set", f"training.groups_per_step={PROMPTS}", "--set", f"training.group_size={GROUP}",
                "--set", f"sampling.max_tokens={MAX_TOKENS}", "--set", f"trainer.learning_rate={RATE}",
                "--set", "evaluation.problems=0", "--set", "checkpoint.every=0",
            ],
            stdout=subprocess.DEVNULL,
        )  # fmt: skip
        seen: dict[int, float] = {}
        until = time.monotonic() + DEADLINE_S
        while process.poll() is None and time.monotonic() < until:
            lines = metrics.read_bytes().count(b"\n") if metrics.exists() else 0
            seen.setdefault(lines, time.perf_counter())
            time.sleep(0.002)
        if process.returncode != 0:
            process.kill()
            raise SystemExit(f"atropos run ended with {process.returncode}")
        rows = [json.loads(line) for line in metrics.read_text().splitlines()]
        rollouts = sum(row["rollouts/count"] for row in rows[SKIP:])
        return {
            "trajectories_per_s": rollouts / (seen[STEPS] - seen[SKIP]),
            "mean_tokens": sum(row["tokens/sampled"] for row in rows[SKIP:]) / rollouts,
        }


def theirs(batch: int, threads: int) -> dict[str, float]:
    from atropos_env_gsm8k.generate import problem
    from atropos_env_gsm8k.plugin import HERE

    problems = [problem("train", index, 0) for index in range(STEPS * PROMPTS)]
    given = {
        "model": str(HERE / "tiny"),
        "problems": [(row["question"], row["answer"].rpartition("#### ")[2]) for row in problems],
        "steps": STEPS, "skip": SKIP, "batch": batch, "prompts": PROMPTS, "group": GROUP, "max_tokens": MAX_TOKENS,
        "threads": threads, "learning_rate": RATE,
    }  # fmt: skip
    ended = subprocess.run(
        [str(TRL), "benchmarks/trl_loop.py", json.dumps(given)],
        capture_output=True, text=True, timeout=DEADLINE_S, env={**os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false",
             "OMP_WAIT_POLICY": "PASSIVE"},
    )  # fmt: skip
    if ended.returncode != 0:
        raise SystemExit(f"TRL failed:\n{ended.stderr[-3000:]}")
    answer: dict[str, float] = json.loads(ended.stdout.splitlines()[-1])
    return answer


def main() -> None:
    rows: list[tuple[str, list[dict[str, float]]]] = []
    runs: dict[str, list[dict[str, float]]] = {}
    for _ in range(REPETITIONS):  # alternating, so that a noisy minute hits all
        for batch in BATCHES:
            for threads in THREADS:
                runs.setdefault(f"TRL, batches of {batch}, threads: {threads}", []).append(theirs(batch, threads))
        runs.setdefault("Atropos", []).append(ours())
        runs.setdefault("Atropos, flat groups trained as well", []).append(
            ours('[transform.drop_flat]\nuse = "none"\n')
        )
    rows = list(runs.items())
    best = {name: max(entry["trajectories_per_s"] for entry in entries) for name, entries in rows}
    trl = max(value for name, value in best.items() if name.startswith("TRL"))
    table = [
        (
            name,
            f"{best[name]:.0f}",
            f"{sorted(entry['trajectories_per_s'] for entry in entries)[len(entries) // 2]:.0f}",
            f"{entries[-1]['mean_tokens']:.1f}",
            f"{best[name] / trl:.2f}",
        )
        for name, entries in rows
    ]
    console.table(("", "trajectories/s, best", "median", "tokens each", "ratio to TRL's best"), table)
    result: dict[str, Any] = {"machine": described(), "steps": STEPS - SKIP, "runs": runs,
                              "ratio": best["Atropos"] / trl}  # fmt: skip
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "quickstart.json").write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()

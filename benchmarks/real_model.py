"""Compares a run of a real model with TRL's GRPOTrainer: python -m benchmarks.real_model [--model MODEL], at most six minutes.

Both train the model (SmolLM2-135M-Instruct of .venv-real, unless another is named) on the same questions: 4 tasks x 4 rollouts a
step, replies of at most 48 tokens, every group trained, float32, strictly on-policy, each with one thread for every core, at a
learning rate of 1e-9, so that the policy stays what it is. Atropos has its defaults for all else. TRL puts the 16 sequences through
the model at once. Each run is a separate process; ours is before and after TRL's. Start-up and the first step are left out. Of
Atropos' step, the update includes what follows it: the logprobs that show how far the policy has moved. Tokens/s are sampled tokens
over the seconds of sampling, and the same tokens over the rest of a step. Memory: the most at once, of all processes of a run
(shared pages once).
Writes benchmarks/results/real_model.json.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

from atropos_core import console
from benchmarks.machine import RESULTS, described
from benchmarks.pretrained import add_model, directory
from benchmarks.threads import ENVIRONMENT

STEPS, SKIP = 3, 1
PROMPTS, GROUP, MAX_TOKENS = 4, 4, 48
RATE = 1e-9
THREADS = len(os.sched_getaffinity(0))
DEADLINE_S = 600
TRL = Path(".venv-trl/bin/python")
QUESTION = "Anna has {} apples and buys {} more. How many now?"  # as in ENVIRONMENT

WAITING = {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "1000"}  # as hosting sets it for ours

Run = dict[str, float]


def ours(model: Path) -> Run:
    with tempfile.TemporaryDirectory(prefix="atropos-bench-") as folder:
        (Path(folder) / "digests.py").write_text(ENVIRONMENT)
        (Path(folder) / "run.toml").write_text('[transform.drop_flat]\nuse = "none"\n')
        run = Path(folder) / "run"
        settings = {
            "training.groups_per_step": PROMPTS, "training.group_size": GROUP, "sampling.max_tokens": MAX_TOKENS,
            "trainer.learning_rate": RATE, "evaluation.problems": 0, "checkpoint.every": 0,
        }  # fmt: skip
        sets = [part for name, value in settings.items() for part in ("--set", f"{name}={value}")]
        command = [
            sys.executable, "-m", "atropos_core", "run", f"{folder}/run.toml", "--env", f"{folder}/digests.py:Digests",
            "--model", str(model), "--dir", str(run), "--steps", str(STEPS), "--seed", "1",
        ]  # fmt: skip
        ended = subprocess.run([*command, *sets], capture_output=True, text=True, timeout=DEADLINE_S)
        if ended.returncode != 0:
            raise SystemExit(f"atropos run failed:\n{ended.stdout[-3000:]}{ended.stderr[-1000:]}")
        rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()][SKIP:]
        peak = json.loads((run / "summary.json").read_text())["peak_bytes"]
    step = median(row["time/step_s"] for row in rows)
    return _run(
        step, median(row["time/waiting_s"] for row in rows), median(row["tokens/sampled"] for row in rows), peak
    )


def theirs(model: Path) -> Run:
    problems = [(QUESTION.format(n, n + 3), str(2 * n + 3)) for n in range(STEPS * PROMPTS)]
    given = {
        "model": str(model), "problems": problems, "steps": STEPS, "skip": SKIP, "batch": PROMPTS * GROUP,
        "prompts": PROMPTS, "group": GROUP, "max_tokens": MAX_TOKENS, "threads": THREADS, "learning_rate": RATE,
    }  # fmt: skip
    same = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", **WAITING}
    ended = subprocess.run(
        [str(TRL), "benchmarks/trl_loop.py", json.dumps(given)],
        capture_output=True, text=True, timeout=DEADLINE_S, env={**os.environ, **same},
    )  # fmt: skip
    if ended.returncode != 0:
        raise SystemExit(f"TRL failed:\n{ended.stderr[-3000:]}")
    found = json.loads(ended.stdout.splitlines()[-1])
    return _run(found["step_s"], found["sampling_s"], found["mean_tokens"] * PROMPTS * GROUP, found["peak_bytes"])


def _run(step_s: float, sampling_s: float, tokens: float, peak: float) -> Run:
    return {
        "trajectories_per_s": PROMPTS * GROUP / step_s, "step_s": step_s, "sampling_s": sampling_s, "tokens": tokens,
        "sampling_tokens_per_s": tokens / sampling_s, "update_tokens_per_s": tokens / (step_s - sampling_s),
        "peak_bytes": peak, "load": round(os.getloadavg()[0], 1),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_model(parser)
    parser.add_argument("--out", type=Path, default=RESULTS / "real_model.json")
    wanted = parser.parse_args()
    if not TRL.exists():
        raise SystemExit(f"TRL is not installed: make {TRL.parts[0]}/stamp")
    machine, began, model = described(), time.perf_counter(), directory(wanted.model)
    runs: dict[str, list[Run]] = {"Atropos": [ours(model)], "TRL": [theirs(model)]}
    runs["Atropos"].append(ours(model))
    middle = {name: {key: median(run[key] for run in those) for key in those[0]} for name, those in runs.items()}
    ratio = {
        name: middle["Atropos"][name] / middle["TRL"][name]
        for name in ("trajectories_per_s", "sampling_tokens_per_s", "update_tokens_per_s", "peak_bytes")
    }
    result: dict[str, Any] = {
        "machine": machine, "model": model.name, "threads": THREADS, "rollouts_a_step": PROMPTS * GROUP,
        "max_tokens": MAX_TOKENS, "runs": runs, "ratio": ratio, "load_at_end": round(os.getloadavg()[0], 1),
        "busy": max(machine["load_at_start"], os.getloadavg()[0] - THREADS) > 1, "seconds": time.perf_counter() - began,
    }  # fmt: skip
    wanted.out.write_text(json.dumps(result, indent=1) + "\n")
    names = {
        "trajectories_per_s": "trajectories/s", "sampling_tokens_per_s": "tokens/s, sampling",
        "update_tokens_per_s": "tokens/s, update", "peak_bytes": "memory at most",
    }  # fmt: skip
    rows = [
        (title, *(f"{middle[who][name]:.4g}" for who in runs), f"{ratio[name]:.2f}") for name, title in names.items()
    ]
    console.table(("", *runs, "ratio"), rows)


if __name__ == "__main__":
    main()

"""A run of four processes beside `atropos run`: python -m benchmarks.roles.

The same run file for both, the tiny policy on gsm8k with nothing evaluated and nothing saved; server, trainer and two workers
against the one command. Start-up and the first steps are left out. The two alternate, so that a noisy minute hits both.
Prints a table and writes benchmarks/results/roles.json.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from atropos_core import console
from benchmarks.machine import RESULTS, described
from tests.conftest import metrics_of
from tests.e2e.roles import Role, scene

DEADLINE_S = 600
RATE = 1e-9  # the policy, and with it the length of its replies, stays what it is


def alone(folder: Path, wanted: argparse.Namespace) -> dict[str, float]:
    trainer = Role(folder, "run", ["run", "--dir", "run", *_settings(wanted)])
    try:
        return _watched(folder, trainer, wanted)
    finally:
        trainer.kill()


def four(folder: Path, wanted: argparse.Namespace) -> dict[str, float]:
    with scene(folder) as place:
        trainer = place.train(*_settings(wanted))
        workers = [place.worker(number, "gsm8k", *wanted.worker) for number in range(wanted.workers)]
        found = _watched(folder, trainer, wanted)
        for worker in workers:
            worker.terminate()
        return found


def _settings(wanted: argparse.Namespace) -> list[str]:
    changes = ["evaluation.problems=0", "checkpoint.every=0", f"trainer.learning_rate={RATE}", *wanted.set]
    return ["--env", "gsm8k", "--steps", str(wanted.steps), *(part for change in changes for part in ("--set", change))]


def _watched(folder: Path, trainer: Role, wanted: argparse.Namespace) -> dict[str, float]:
    """What happens between the ends of two steps. One line of metrics is written at the end of each."""
    file = folder / "run" / "metrics.jsonl"
    ended_at: dict[int, float] = {}
    until = time.monotonic() + DEADLINE_S
    while trainer.process.poll() is None and time.monotonic() < until:
        lines = file.read_bytes().count(b"\n") if file.exists() else 0
        ended_at.setdefault(lines, time.perf_counter())
        time.sleep(0.005)
    if trainer.process.returncode != 0:
        raise SystemExit(f"{trainer.output.stem} did not end well:\n{trainer.text[-3000:]}")
    rows = metrics_of(folder / "run")[wanted.skip : wanted.steps]
    seconds = ended_at[wanted.steps] - ended_at[wanted.skip]
    tokens = sum(row["tokens/sampled"] for row in rows)
    return {
        "steps_per_s": len(rows) / seconds,
        "tokens_per_s": tokens / seconds,
        "mean_tokens": tokens / sum(row["rollouts/count"] for row in rows),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--skip", type=int, default=5)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--set", action="append", default=[], help="KEY=VALUE of the run file, for both")
    parser.add_argument("--worker", action="append", default=[], help="one more argument of `atropos env`")
    wanted = parser.parse_args()
    roles = f"serve, train, {wanted.workers} x env"
    runs: dict[str, list[dict[str, float]]] = {"atropos run": [], roles: []}
    for _ in range(wanted.repetitions):
        for name, measure in (("atropos run", alone), (roles, four)):
            with tempfile.TemporaryDirectory(prefix="atropos-roles-") as folder:
                runs[name].append(measure(Path(folder), wanted))
                console.say(f"{name}: {runs[name][-1]['tokens_per_s']:.0f} tokens/s")

    def median(name: str, column: str) -> float:
        return statistics.median(run[column] for run in runs[name])

    console.table(
        ("", "steps/s", "tokens/s, median", "best", "tokens each"),
        [
            (
                name,
                f"{median(name, 'steps_per_s'):.2f}",
                f"{median(name, 'tokens_per_s'):.0f}",
                f"{max(run['tokens_per_s'] for run in runs[name]):.0f}",
                f"{median(name, 'mean_tokens'):.1f}",
            )
            for name in runs
        ],
    )
    ratio = median(roles, "tokens_per_s") / median("atropos run", "tokens_per_s")
    console.say(f"four processes sample {ratio:.2f} of what one command does")
    result: dict[str, Any] = {
        "machine": described(), "steps": wanted.steps - wanted.skip, "set": wanted.set, "runs": runs, "ratio": ratio,
    }  # fmt: skip
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "roles.json").write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()

"""What each sink costs a step, and what it leaves on the disk: python -m benchmarks.sinks

The metrics are those of a real toy run, recorded again as so many steps. The time is that of `Sink.step`, which the loop waits
for; opening and closing are beside it. Writes benchmarks/results/sinks.json.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from atropos_core import console
from atropos_core.config.component import Component
from atropos_core.config.resolve import inner
from atropos_core.plugins.provider import RunContext
from atropos_core.storage.atomic import size_bytes
from benchmarks.machine import RESULTS, described
from tests.conftest import TOY, metrics_of
from tests.e2e.runs import finish

SINKS: dict[str, dict[str, Any]] = {
    "jsonl": {},
    "csv": {},
    "tensorboard": {},
    "wandb": {"mode": "offline"},
}


async def recorded(name: str, options: dict[str, Any], lines: list[dict[str, float]], steps: int, folder: Path) -> Any:
    folder.mkdir()
    chosen = inner("sink", f"sink.{name}", Component(use=name, **options))
    sink = chosen.build(RunContext(directory=folder, model=folder))
    began = time.perf_counter()
    await sink.open()
    opened, taken = time.perf_counter(), []
    for step in range(steps):
        start = time.perf_counter()
        await sink.step(step, lines[min(step, 1) if step < 2 else 1 + step % (len(lines) - 1)], [])
        taken.append(time.perf_counter() - start)
    closing = time.perf_counter()
    await sink.close()
    taken.sort()
    return {
        "open_s": opened - began,
        "step_ms_median": 1e3 * statistics.median(taken),
        "step_ms_p99": 1e3 * taken[int(0.99 * len(taken))],
        "close_s": time.perf_counter() - closing,
        "bytes_per_step": size_bytes(folder) / steps,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1000)
    wanted = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="atropos-sinks-") as scratch:
        folder = Path(scratch)
        (folder / "sevens.py").write_text(TOY)
        finish(folder / "run", "run", "--model", "toy", "--env", f"{folder}/sevens.py:Sevens", "--dir",
               str(folder / "run"), "--steps", "8", "--set", "evaluation.problems=4")  # fmt: skip
        lines = [{name: value for name, value in line.items() if name != "step"} for line in metrics_of(folder / "run")]
        result = {"machine": described(), "steps": wanted.steps, "metrics": len(lines[1])}
        for name, options in SINKS.items():
            result[name] = asyncio.run(recorded(name, options, lines, wanted.steps, folder / name))
    rows = [(name, *(f"{value:.3g}" for value in result[name].values())) for name in SINKS]
    console.say(f"{result['metrics']} metrics a step")
    console.table(("sink", *result["csv"]), rows)
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "sinks.json").write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()

"""Measure what it costs to score recorded rollouts again: python -m benchmarks.rescoring

Runs with 10,000 and 100,000 rollouts are made up, and `atropos rescore` scores each with a trivial reward in a process of its own,
whose memory is measured. Writes benchmarks/results/rescoring.json.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from atropos_core import console
from atropos_core.advantages import group_advantages
from atropos_core.builtin.config import JsonlOptions
from atropos_core.builtin.sinks import JsonlSink
from atropos_core.interfaces import SettledGroup, StepRecord
from atropos_testing.samples import make_group
from benchmarks.machine import RESULTS, described

GROUPS, MEMBERS = 125, 8  # of a step: 1,000 rollouts
MOST_S = 60.0  # for 100,000 rollouts
REWARD = """
import numpy as np

async def length(task, episodes):
    return np.array([float(len(episode.messages[-1]["content"])) for episode in episodes])
"""


def groups_of(step: int) -> Iterator[SettledGroup]:
    draw = np.random.default_rng(step)
    for number in range(GROUPS):
        made = make_group(step * GROUPS + number, [float(one) for one in draw.random(MEMBERS).round(3)])
        yield SettledGroup(made.with_advantages(group_advantages(made.rewards)), "trained")


async def recorded(run: Path, steps: int) -> None:
    run.mkdir()
    (run / "config.toml").write_text("[sink.jsonl]\n")
    sink = JsonlSink(JsonlOptions(), run)
    await sink.open()
    for step in range(1, steps + 1):
        groups = list(groups_of(step))
        await sink.record(StepRecord(step, {}, [one.group for one in groups], groups))
    await sink.close()


def rescored(run: Path, reward: str) -> dict[str, Any]:
    began = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, "-m", "atropos_core", "rescore", str(run), "--reward", reward, "--json"],
        stdout=subprocess.PIPE,
    )
    assert process.stdout is not None
    found = json.loads(process.stdout.read())
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        raise SystemExit(f"atropos rescore ended with {status}")
    seconds = time.perf_counter() - began
    return {"rollouts": found["rollouts"], "seconds": seconds, "peak_bytes": usage.ru_maxrss * 1024}


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    about = described()
    rows = []
    with tempfile.TemporaryDirectory(prefix="atropos-rescoring-") as scratch:
        (Path(scratch) / "reward.py").write_text(REWARD)
        for steps in (10, 100):
            asyncio.run(recorded(run := Path(scratch) / f"run-{steps}", steps))
            rows.append(rescored(run, f"{scratch}/reward.py:length"))
    console.table(
        ("rollouts", "seconds", "peak memory"),
        [(f"{one['rollouts']:,}", f"{one['seconds']:.1f}", f"{one['peak_bytes'] / 1e6:.0f} MB") for one in rows],
    )
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "rescoring.json").write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n")
    if rows[-1]["seconds"] > MOST_S:
        raise SystemExit(f"{rows[-1]['rollouts']:,} rollouts take more than {MOST_S:.0f} s")


if __name__ == "__main__":
    main()

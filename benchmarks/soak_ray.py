"""Runs on a simulated Ray cluster for long: thirty random kills of worker node, engine node, trainer node and driver, and what three
accounts say of the draws afterwards. Runs in .venv-ray: `python -m benchmarks.soak_ray`."""

from __future__ import annotations

import argparse
import json
import os
import random
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from atropos_core import console
from benchmarks.machine import RESULTS, described
from tests.ray.conftest import RunningCluster
from tests.ray.kills import CPUS, Killed, accounts, kill_at_random, nothing_is_left, on_roles, write_run
from tests.ray.test_runs import actors
from tests.shared_memory import SharedFiles


def kills(number: int, seed: int, folder: Path) -> dict[str, Any]:
    """Raises AssertionError, with what was printed, where one of them does not end as it must."""
    cluster = RunningCluster(folder / "cluster.log")
    try:
        cluster.say(f"add workers {CPUS['workers']}")
        each = {"count": 2, "other": {"workers": 0.5}}
        killed = Killed(
            folder, write_run(folder, {**on_roles(cluster.address), "workers": {"waiting": each}}, wait=0.5)
        )
        try:
            killed.until("step", lambda: killed.steps > 1)
            began = time.monotonic()
            with SharedFiles().watching() as files:
                found = kill_at_random(killed, cluster, number, random.Random(seed))
                lasted_s = time.monotonic() - began
                killed.stop()
            counted = accounts(folder)
            nothing_is_left(killed, files)
            left = actors(cluster)
        finally:
            killed.end()
    finally:
        cluster.close()
    seconds = sorted(one["seconds"] for one in found)
    return {
        "kills": found, "outcomes": Counter(f"{one['kind']}: {one['outcome']}" for one in found), "seconds": round(lasted_s),
        "until_the_next_step_s": {"median": seconds[len(seconds) // 2], "most": seconds[-1]}, **counted, "actors_left": left,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    os.environ |= {"OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory(prefix="soak-ray-") as folder:
        found = {"machine": described(), "seed": given.seed, **kills(given.kills, given.seed, Path(folder))}
    (RESULTS / "soak_ray.json").write_text(json.dumps(found, indent=1) + "\n")
    console.say(json.dumps(found, indent=1))
    raise SystemExit(1 if found["actors_left"] else 0)


if __name__ == "__main__":
    main()

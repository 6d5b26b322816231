"""Compare the first call of `cos` in fresh processes, with and without `cpu_warmup.warm_up`: python -m benchmarks.first_calls

Thousands of processes are forked from one that has imported torch and computed nothing, a few at a time on few cores, so
that threads are often interrupted. Each computes the cosines of a rotary table with two threads, and compares them with
float64. Writes benchmarks/results/first_calls.json. Ends with 1 if a process that warmed up was wrong.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence

import numpy as np

from atropos_core import console
from atropos_torch_models.cpu_warmup import warm_up
from benchmarks.machine import RESULTS, described

ANGLES = np.outer(np.arange(256, dtype=np.float32), np.float32(10_000) ** (-np.arange(16, dtype=np.float32) / 16))
EXACT = np.cos(ANGLES.astype(np.float64))
AT_ONCE = 4


def worst(warm: bool) -> float:
    """In a process of its own, which ends with it: the largest error of its first cosines."""
    import torch

    torch.set_num_threads(2)
    angles = torch.from_numpy(ANGLES.copy())
    if warm:
        warm_up()
    return float(np.abs(torch.cos(angles).numpy() - EXACT).max())


def storm(processes: int, warm: bool) -> list[float]:
    errors: list[float] = []
    running: dict[int, int] = {}
    for number in range(processes + AT_ONCE):
        if number < processes:
            read, write = os.pipe()
            if (pid := os.fork()) == 0:
                os.write(write, repr(worst(warm)).encode())
                os._exit(0)
            os.close(write)
            running[pid] = read
        if running and (len(running) >= AT_ONCE or number >= processes):
            pid, _ = os.wait()
            with os.fdopen(running.pop(pid)) as answer:
                errors.append(float(answer.read()))
    return errors


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=4000)
    wanted = parser.parse_args(arguments)
    import torch  # noqa: F401 # before the first fork

    found, rows = {}, []
    for name, warm in (("as torch comes", False), ("warmed up", True)):
        errors = storm(wanted.processes, warm)
        wrong = [error for error in errors if error > 1e-6]
        found[name] = {"processes": len(errors), "wrong": len(wrong), "largest": max(errors)}
        rows.append((name, len(errors), len(wrong), f"{max(errors):.1e}"))
    console.table(("first call of cos", "processes", "wrong", "largest error"), rows)
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "first_calls.json").write_text(json.dumps({"machine": described()} | found, indent=1) + "\n")
    raise SystemExit(1 if found["warmed up"]["wrong"] else 0)


if __name__ == "__main__":
    main()

"""How long a command takes before it does anything: python -m benchmarks.startup.

With every plugin that is installed here, each command in a process of its own, the median and the best of eleven, taken in turn.
Beside them what Python alone takes, and what the libraries take that every command needs; and what `make run` takes to its first step,
the evaluation of 512 problems before it included, the median of five. Writes benchmarks/results/startup.json. Machines differ by a
factor of two from day to day, so the limits are ratios: ends with 1 if `atropos plugins` or `atropos --help` takes more than twice
the CPU time of those libraries, or that first step comes after more than 80 times as long as importing them takes.
"""

from __future__ import annotations

import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from time import perf_counter, sleep

from atropos_core import console
from atropos_core.plugins.manager import load_plugins
from benchmarks.machine import RESULTS, described

REPETITIONS = 11
MOST_RATIO = 2.0  # of CPU, to that of the libraries
MOST_TO_FIRST_STEP = 80.0  # by the clock, to the same: 8 s if they take 0.1 s
RUNS, RUN_DEADLINE_S = 5, 120.0
LIBRARIES = "typer, rich, pydantic"
LISTED = ("-m", "atropos_core", "plugins")
COMMANDS = {
    "python": ("-c", "pass"),
    LIBRARIES: ("-c", "import typer, rich.table, pydantic"),
    "import atropos_core": ("-c", "import atropos_core"),
    "atropos --help": ("-m", "atropos_core", "--help"),
    "atropos plugins": LISTED,
    "atropos run --help": ("-m", "atropos_core", "run", "--help"),
}


def seconds(arguments: tuple[str, ...]) -> tuple[float, float]:
    """By the clock, and of CPU."""
    start, before = perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, *arguments], check=True, stdout=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return perf_counter() - start, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def to_first_step() -> float:
    """Seconds of `make run` until its first step is in the run's metrics."""
    with tempfile.TemporaryDirectory() as folder:
        metrics, start = Path(folder) / "run/metrics.jsonl", perf_counter()
        process = subprocess.Popen(
            [
                sys.executable, "-m", "atropos_core", "run", "--bridge", "ipc", "--env", "gsm8k", "--dir", str(metrics.parent),
                "--steps", "2",  # the last one is followed by another evaluation
            ],
            cwd=folder, env={**os.environ, "HF_HUB_OFFLINE": "1"}, stdout=subprocess.DEVNULL,
        )  # fmt: skip
        found = 0.0
        try:
            while process.poll() is None and perf_counter() - start < RUN_DEADLINE_S:
                if not found and metrics.is_file() and metrics.read_bytes().count(b"\n") > 1:  # after that of step 0
                    found = perf_counter() - start
                sleep(0.002)
        finally:
            process.kill()
        if process.wait() != 0 or not found:
            raise SystemExit(f"`atropos run` ended with {process.returncode} and no step within {RUN_DEADLINE_S:.0f} s")
        return found


def main() -> None:
    about = described()
    installed = len(load_plugins().reports)
    seconds(LISTED)  # what was never read comes from the disk
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in COMMANDS}
    for _ in range(REPETITIONS):  # in turn, so that a machine that slows down slows all of them
        for name, arguments in COMMANDS.items():
            taken[name].append(seconds(arguments))
    wall = {name: [one for one, _ in of] for name, of in taken.items()}
    cpu = {name: [one for _, one in of] for name, of in taken.items()}
    ratios = {name: statistics.median(of) / statistics.median(cpu[LIBRARIES]) for name, of in cpu.items()}
    rows = [
        (name, f"{statistics.median(wall[name]):.2f}", f"{min(wall[name]):.2f}", f"{ratios[name]:.2f}")
        for name in COMMANDS
    ]
    first = [to_first_step() for _ in range(RUNS)]
    rows.append(("make run, to its first step", f"{statistics.median(first):.2f}", f"{min(first):.2f}", ""))
    console.table((f"{installed} plugins", "median [s]", "best [s]", "CPU, to libraries"), rows)
    RESULTS.mkdir(exist_ok=True)
    found = {**about, "plugins": installed, "seconds": wall, "cpu_seconds": cpu, "to_first_step_seconds": first}
    (RESULTS / "startup.json").write_text(json.dumps(found, indent=1) + "\n")
    if too_long := [name for name in ("atropos plugins", "atropos --help") if ratios[name] > MOST_RATIO]:
        raise SystemExit(f"more than {MOST_RATIO} times the CPU of {LIBRARIES}: {', '.join(too_long)}")
    if (longer := statistics.median(first) / statistics.median(wall[LIBRARIES])) > MOST_TO_FIRST_STEP:
        raise SystemExit(
            f"the first step of `make run` takes {longer:.0f} times importing {LIBRARIES}, more than {MOST_TO_FIRST_STEP:g}"
        )


if __name__ == "__main__":
    main()

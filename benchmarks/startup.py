"""How long a command takes before it does anything: python -m benchmarks.startup.

With every plugin that is installed here, each command in a process of its own, the median and the best of eleven, taken in turn.
Beside them what Python alone takes, and what the libraries take that every command needs. Writes
benchmarks/results/startup.json; ends with 1 where `atropos plugins` takes 0.4 s or more.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from time import perf_counter

from atropos_core import console
from atropos_core.plugins.manager import load_plugins
from benchmarks.machine import RESULTS, described

REPETITIONS = 11
MOST_S = 0.4  # of `atropos plugins`
LISTED = ("-m", "atropos_core", "plugins")
COMMANDS = {
    "python": ("-c", "pass"),
    "typer, rich, pydantic": ("-c", "import typer, rich.table, pydantic"),
    "import atropos_core": ("-c", "import atropos_core"),
    "atropos --help": ("-m", "atropos_core", "--help"),
    "atropos plugins": LISTED,
    "atropos run --help": ("-m", "atropos_core", "run", "--help"),
}


def seconds(arguments: tuple[str, ...]) -> float:
    start = perf_counter()
    subprocess.run([sys.executable, *arguments], check=True, stdout=subprocess.DEVNULL)
    return perf_counter() - start


def main() -> None:
    about = described()
    installed = len(load_plugins().reports)
    seconds(LISTED)  # what was never read comes from the disk
    taken: dict[str, list[float]] = {name: [] for name in COMMANDS}
    for _ in range(REPETITIONS):  # in turn, so that a machine that slows down slows all of them
        for name, arguments in COMMANDS.items():
            taken[name].append(seconds(arguments))
    rows = [(name, f"{statistics.median(of):.2f}", f"{min(of):.2f}") for name, of in taken.items()]
    console.table((f"{installed} plugins", "median [s]", "best [s]"), rows)
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "startup.json").write_text(
        json.dumps({**about, "plugins": installed, "seconds": taken}, indent=1) + "\n"
    )
    if statistics.median(taken["atropos plugins"]) >= MOST_S:
        raise SystemExit(f"`atropos plugins` takes {MOST_S} s or more")


if __name__ == "__main__":
    main()

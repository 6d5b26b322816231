"""A training step over the Tinker protocol next to the same step of `atropos run`: python -m benchmarks.tinker

Both train the same LoRA adapter of the tiny policy on the same draws: `atropos run` with its own trainer and engine, and with those of
`atropos tinker` on this machine, over the official client (TINKER_PYTHON names its environment: `make bench-tinker` sets it). They take
turns, so that the machine's mood is the same for both. A step is all of it: rollouts, update and publication, without evaluation and
checkpoint. The start of the server is not counted. Writes benchmarks/results/tinker.json.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

from atropos_core import console
from atropos_core.plugins.manager import load_plugins
from benchmarks.machine import RESULTS, described
from tests.tinker.server import CLIENT, TinkerServer, tinker_server
from tests.tinker.test_atropos_run import AT_THE_SERVER, HERE, finish, start

WARM = 3  # first steps that do not count
PARTS = ("step", "rollouts", "training")
COMMON = (
    "--env", "gsm8k", "--model", "tiny", "--set", "evaluation.problems=0", "--set", "checkpoint.every=1000", "--set", "trainer.loss=grpo",
    "--set", "trainer.eps=1e-4", "--set", "trainer.betas=[0.9,0.95]",
)  # fmt: skip
SIDES = {"own": HERE, "tinker": AT_THE_SERVER}


def seconds_of(server: TinkerServer, side: str, directory: Path, steps: int) -> list[dict[str, float]]:
    run = directory / "run"
    directory.mkdir()
    finish(
        start(server, directory / "log", "run", *COMMON, *SIDES[side], "--steps", str(steps), "--dir", str(run)),
        directory / "log",
    )
    rows: list[dict[str, Any]] = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{part: row[f"time/{part}_s"] for part in PARTS} for row in rows if row["step"] > WARM]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=12)
    wanted = parser.parse_args()
    if not CLIENT:
        raise SystemExit("TINKER_PYTHON names no Python with the official client: use `make bench-tinker`")
    about = described()
    times: dict[str, list[dict[str, float]]] = {side: [] for side in SIDES}
    with tempfile.TemporaryDirectory(prefix="atropos-tinker-") as scratch:
        folder = Path(scratch)
        model = str(load_plugins().resolve_model("tiny", download=False).directory)
        with tinker_server(folder, model) as server:
            for number in range(wanted.rounds):
                for side in SIDES:
                    times[side] += seconds_of(server, side, folder / f"{side}-{number}", wanted.steps)
    medians = {
        side: {part: statistics.median(one[part] for one in rows) for part in PARTS} for side, rows in times.items()
    }
    ratio = {part: medians["tinker"][part] / medians["own"][part] for part in PARTS}
    console.table(
        ("part of a step", "own trainer and engine [s]", "over the protocol [s]", "ratio"),
        [(part, *(f"{medians[side][part]:.3f}" for side in SIDES), f"{ratio[part]:.2f}") for part in PARTS],
    )
    result = {"machine": about, "rounds": wanted.rounds, "steps": wanted.steps, "seconds": medians, "ratio": ratio}
    (RESULTS / "tinker.json").write_text(json.dumps(result, indent=1) + "\n")
    if ratio["step"] > 1.3:
        raise SystemExit(f"a step over the protocol takes {ratio['step']:.2f} times as long")


if __name__ == "__main__":
    main()

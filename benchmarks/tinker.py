"""A training step over the Tinker protocol next to the same step of `atropos run`: python -m benchmarks.tinker [--model MODEL]

Both train the same LoRA adapter on the same draws: `atropos run` with its own trainer and engine, and with those of `atropos tinker` on
this machine, over the official client (TINKER_PYTHON names its environment: `make bench-tinker` sets it). They take turns, so that both
meet the same load of the machine. A step is all of it: rollouts, update and publication, without evaluation and checkpoint. The start of
the server is not counted.

Two models: SmolLM2-135M-Instruct of .venv-real, unless another is named (4 tasks x 4 rollouts of at most 48 tokens; its step must take at
most 1.3 times as long), and the tiny policy, of whose step (128 rollouts of 23 tokens) the protocol is the larger part.
Writes benchmarks/results/tinker.json.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from atropos_core import console
from atropos_core.plugins.manager import load_plugins
from benchmarks.machine import RESULTS, described
from benchmarks.pretrained import add_model, directory
from benchmarks.threads import ENVIRONMENT
from tests.tinker.server import CLIENT, TinkerServer, tinker_server
from tests.tinker.test_atropos_run import AT_THE_SERVER, HERE, finish, start

MOST = 1.3  # of the pretrained model's step
PARTS = ("step", "rollouts", "training")
COMMON = (
    "--set", "evaluation.problems=0", "--set", "checkpoint.every=1000", "--set", "trainer.loss=grpo",
    "--set", "trainer.eps=1e-4", "--set", "trainer.betas=[0.9,0.95]",
)  # fmt: skip
SMALL = (
    "--set", "training.groups_per_step=4", "--set", "training.group_size=4", "--set", "sampling.max_tokens=48",
)  # fmt: skip
SIDES = {"own": HERE, "tinker": AT_THE_SERVER}


@dataclass(frozen=True)
class Work:
    """`warm`: the first steps, which do not count."""

    model: str
    environment: str
    steps: int
    warm: int
    rounds: int
    arguments: tuple[str, ...] = ()


def seconds_of(server: TinkerServer, side: str, directory: Path, work: Work) -> list[dict[str, float]]:
    run = directory / "run"
    directory.mkdir()
    asked = ["--env", work.environment, "--model", work.model, "--steps", str(work.steps)]
    arguments = [*asked, *COMMON, *work.arguments, *SIDES[side]]
    finish(start(server, directory / "log", "run", *arguments, "--dir", str(run)), directory / "log")
    rows: list[dict[str, Any]] = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{part: row[f"time/{part}_s"] for part in PARTS} for row in rows if row["step"] > work.warm]


def measured(work: Work) -> dict[str, Any]:
    """Return the median seconds of both sides for each part of a step, and their ratios."""
    times: dict[str, list[dict[str, float]]] = {side: [] for side in SIDES}
    with tempfile.TemporaryDirectory(prefix="atropos-tinker-") as scratch:
        folder = Path(scratch)
        with tinker_server(folder, work.model) as server:
            for number in range(work.rounds):
                for side in SIDES:
                    times[side] += seconds_of(server, side, folder / f"{side}-{number}", work)
    medians = {
        side: {part: statistics.median(one[part] for one in rows) for part in PARTS} for side, rows in times.items()
    }
    ratio = {part: medians["tinker"][part] / medians["own"][part] for part in PARTS}
    console.table(
        ("part of a step", "own trainer and engine [s]", "over the protocol [s]", "ratio"),
        [(part, *(f"{medians[side][part]:.3f}" for side in SIDES), f"{ratio[part]:.2f}") for part in PARTS],
    )
    return {"rounds": work.rounds, "steps": work.steps, "seconds": medians, "ratio": ratio}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_model(parser)
    wanted = parser.parse_args()
    if not CLIENT:
        raise SystemExit("TINKER_PYTHON names no Python with the official client: use `make bench-tinker`")
    tiny = str(load_plugins().resolve_model("tiny", download=False).directory)
    with tempfile.TemporaryDirectory(prefix="atropos-tinker-") as folder:
        (Path(folder) / "digests.py").write_text(ENVIRONMENT)
        digests, model = f"{folder}/digests.py:Digests", str(directory(wanted.model))
        result = {
            "machine": described(),
            "pretrained": measured(Work(model, digests, steps=4, warm=1, rounds=2, arguments=SMALL)),
            "tiny": measured(Work(tiny, "gsm8k", steps=12, warm=3, rounds=3)),
        }
    (RESULTS / "tinker.json").write_text(json.dumps(result, indent=1) + "\n")
    if (ratio := result["pretrained"]["ratio"]["step"]) > MOST:
        raise SystemExit(f"a step over the protocol takes {ratio:.2f} times as long, and may take {MOST}")


if __name__ == "__main__":
    main()

"""Is this version as fast as another? python -m benchmarks.versions CHECKOUT [--families llama qwen3 ...], about ten minutes.

CHECKOUT is another version with its environment (`make .venv/test.stamp` there). For each family of models that both versions train
packed and sample in slots, a process of each version holds the same small random model and takes turns with the other: one update of 64
sequences as long as GSM8K's, then 64 replies of 32 tokens. One thread each. The least CPU time of all turns counts, since other work on the
machine only adds to it. Opening, which probes the model, is not in the figures. Writes benchmarks/results/versions.json; ends with 1
if a family is below BOUND of the other version's speed in either.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np

from atropos_core import console
from benchmarks import trainer_work
from benchmarks.machine import RESULTS, described

HERE = Path(__file__).parents[1]
BOUND = 0.9  # of the other version's speed: below it, more than noise
WARMUP, TURNS = 2, 12
PROMPTS, GROUP = 8, 8
VOCABULARY = 598
TOKENIZER = '{"version": "1.0", "model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}}'  # has no token that ends a reply


class Version:
    """A process of one version, which holds one model."""

    def __init__(self, checkout: Path, model: Path, batch: Path) -> None:
        given = {"model": str(model), "batch": str(batch), "vocabulary": VOCABULARY, "prompts": PROMPTS, "group": GROUP}
        self.errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 # closed by `close`
        self.process = subprocess.Popen(
            [checkout / ".venv" / "bin" / "python", HERE / "benchmarks" / "versions_child.py", json.dumps(given)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.errors, text=True, cwd=checkout,
            env={**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"},
        )  # fmt: skip

    def ask(self, what: str) -> float | None:
        """CPU seconds that it took; None if this version refuses the model."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(what + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            self.errors.seek(0)
            raise SystemExit(f"a process of {self.process.args!r} ended:\n{self.errors.read()[-3000:]}")
        answer: dict[str, Any] = json.loads(line)
        return None if "refused" in answer else float(answer["seconds"])

    def close(self) -> None:
        self.process.communicate(timeout=60)
        self.errors.close()


def exact_families() -> list[str]:
    """Families whose packed layout and slots are exact here, by benchmarks/results/models.json."""
    families = json.loads((RESULTS / "models.json").read_text())["families"]

    def exact(off: Any) -> bool:
        return isinstance(off, float) and off < 1e-3

    return [
        name
        for name, of in families.items()
        if exact(of["trainer"]["packed"]) and exact(of["engine"]["off"].get("slots"))
    ]


def save_model(family: str, directory: Path) -> None:
    from atropos_torch_models.small_model import small_model
    from tests.models.families import config_of

    model = small_model(config_of(family))
    model.config.eos_token_id = model.generation_config.eos_token_id = None  # nothing stops early
    model.save_pretrained(directory)
    (directory / "tokenizer.json").write_text(TOKENIZER)


def measure(checkouts: dict[str, Path], family: str, batch: Path) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="atropos-versions-") as folder:
        save_model(family, Path(folder))
        versions = {name: Version(checkout, Path(folder), batch) for name, checkout in checkouts.items()}
        taken: dict[str, list[float]] = {}
        try:
            for what in ("open", "update", "sample"):
                if refused := [name for name, version in versions.items() if version.ask(what) is None]:
                    return {"refused": f"by {' and '.join(refused)}: {what}"}
            for turn in range(WARMUP + TURNS):
                for what in ("update", "sample"):
                    order = list(versions.items())
                    for name, version in order if turn % 2 else reversed(order):
                        seconds = version.ask(what)
                        if turn >= WARMUP and seconds is not None:
                            taken.setdefault(f"{what} {name}", []).append(seconds)
        finally:
            for version in versions.values():
                version.close()
    return {
        what: {
            "this": min(taken[f"{what} this"]), "other": min(taken[f"{what} other"]),
            "speed": min(taken[f"{what} other"]) / min(taken[f"{what} this"]),
        }
        for what in ("update", "sample")
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path)
    parser.add_argument("--families", nargs="+")
    options = parser.parse_args()
    other = options.checkout.resolve()
    commit = subprocess.run(
        ["git", "-C", other, "rev-parse", "HEAD"], capture_output=True, text=True, check=True
    ).stdout.strip()
    machine = described()
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="atropos-versions-") as folder:
        batch = trainer_work.batch(*trainer_work.lengths(PROMPTS, GROUP, 0), VOCABULARY)
        columns = [field.name for field in fields(batch) if field.name not in ("version", "columns", "ragged")]
        np.savez(Path(folder) / "batch.npz", **{column: getattr(batch, column) for column in columns})
        for family in options.families or exact_families():
            found[family] = measure({"this": HERE, "other": other}, family, Path(folder) / "batch.npz")
            console.say(f"{family}: {found[family]}")
    both = {name: of for name, of in found.items() if "refused" not in of}
    console.table(
        ("family", "update, CPU s", "speed", "64 replies, CPU s", "speed"),
        [
            (
                name,
                f"{of['update']['this']:.3f}",
                f"{of['update']['speed']:.2f}",
                f"{of['sample']['this']:.3f}",
                f"{of['sample']['speed']:.2f}",
            )
            for name, of in both.items()
        ],
    )
    speeds = {what: [of[what]["speed"] for of in both.values()] for what in ("update", "sample")}
    mean = {what: math.exp(statistics.fmean(map(math.log, those))) for what, those in speeds.items()}
    for what, those in speeds.items():
        console.say(
            f"{what}: geometric mean {mean[what]:.3f}, from {min(those):.2f} to {max(those):.2f}, {len(those)} families"
        )
    result = {
        "machine": machine,
        "other": commit,
        "turns": TURNS,
        "tokens": len(batch.tokens),
        "mean": mean,
        "families": found,
    }
    (RESULTS / "versions.json").write_text(json.dumps(result, indent=1) + "\n")
    sys.exit(0 if min(min(those) for those in speeds.values()) >= BOUND else 1)


if __name__ == "__main__":
    main()

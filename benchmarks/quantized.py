"""What a base in 4 or 8 bits costs an adapter in reward: python -m benchmarks.quantized

The policy `tiny`, and the same rounded by `atropos quantize` to each format, with a LoRA adapter of trainer `grpo`; a rounded one is held
in 4 or 8 bits. Per seed: held-out accuracy before and after, and the largest difference between the logprobs of engine and trainer at any
step. Writes benchmarks/results/quantized.json.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from statistics import mean
from typing import Any

from atropos_core import console
from benchmarks.machine import RESULTS, described
from tests.conftest import metrics_of
from tests.e2e.runs import finish

STEPS, PROBLEMS = 40, 512
SETTINGS = [  # of tiny's preset, which a copy of it has not
    "training.groups_per_step=16", "training.group_size=8", "sampling.max_tokens=64", "trainer.loss=dapo",
    "trainer.learning_rate=1e-4", "trainer.betas=[0.9, 0.99]", "trainer.warmup_steps=5", f"evaluation.problems={PROBLEMS}",
    "checkpoint.every=0",
]  # fmt: skip
FORMATS = ("nf4", "int8")
BASES = ("float32", *FORMATS)
WITHIN = 0.02  # of what the adapter beside the whole base reaches, on average over seeds


def learned(folder: Path, model: str, seed: int, *sets: str) -> dict[str, Any]:
    run = ["run", "--env", "gsm8k", "--model", model, "--bridge", "lora", "--dir", str(folder), "--seed", str(seed)]
    changes = [part for one in (*SETTINGS, *sets) for part in ("--set", one)]
    finish(folder.parent, *run, "--steps", str(STEPS), *changes, deadline_s=1800)
    lines = metrics_of(folder)
    accuracy = [line["eval/accuracy"] for line in lines if "eval/accuracy" in line]
    gap = max(line.get("alignment/max_abs_logprob_diff", 0.0) for line in lines)
    return {"before": accuracy[0], "after": accuracy[-1], "gap_nats": gap}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=5)
    seeds = parser.parse_args().seeds
    rows = []
    with tempfile.TemporaryDirectory() as temporary:
        for format in FORMATS:
            finish(Path(temporary), "quantize", "tiny", str(Path(temporary) / format), "--format", format)
        for seed in range(seeds):
            row: dict[str, Any] = {"seed": seed, "float32": learned(Path(temporary) / f"whole-{seed}", "tiny", seed)}
            for format in FORMATS:
                model, folder = str(Path(temporary) / format), Path(temporary) / f"{format}-{seed}"
                row[format] = learned(folder, model, seed, f"trainer.lora.quantization={format}")
            rows.append(row)
            (RESULTS / "quantized.json").write_text(
                json.dumps({**described(), "steps": STEPS, "problems": PROBLEMS, "rows": rows}, indent=1) + "\n"
            )
    console.table(
        ["seed", "base", "before", "after", "largest difference of logprobs"],
        [
            [row["seed"], base, f"{of['before']:.1%}", f"{of['after']:.1%}", f"{of['gap_nats']:.1e}"]
            for row in rows
            for base in BASES
            for of in [row[base]]
        ],
    )
    ends = {base: mean(row[base]["after"] for row in rows) for base in BASES}
    console.say(f"on average {', '.join(f'{base} {after:.1%}' for base, after in ends.items())}")
    if lost := [base for base in FORMATS if ends[base] < ends["float32"] - WITHIN]:
        raise SystemExit(f"more than {WITHIN:.0%} are lost by {', '.join(lost)}")


if __name__ == "__main__":
    main()

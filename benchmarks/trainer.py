"""Update steps of the trainer beside those of TRL's GRPOTrainer: python -m benchmarks.trainer, about ten minutes.

The same models (the tiny policy, and a random one of 30 M parameters with a vocabulary of 32,000), the same sequences with the
lengths of GSM8K, the same number of threads, float32, nothing generated; TRL at the fastest of several batch sizes. Each
measurement is a process of its own, whose first step, a short one, is left out. Ours and TRL's alternate, and medians
count. Then eight branches of one episode, which have three quarters of their tokens in common; what each trick gives,
and what a token costs by the length of its sequence. CPU seconds stand beside tokens/s: other
work on the machine hardly moves them. Writes benchmarks/results/trainer.json; ends with 1 where a bound does not hold.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np

from atropos_core import console
from atropos_core.types import Batch
from benchmarks import trainer_work
from benchmarks.machine import RESULTS, described

THREADS = len(os.sched_getaffinity(0))
DEADLINE_S = 600
GROUP = 8
TRL = ".venv-trl/bin/python"
PROMPTS = {"tiny": 16, "30M": 2}
STEPS = {"tiny": 3, "30M": 1}  # that are measured in a process
BATCHES = {"tiny": (8, 32, 128), "30M": (1, 4, 16)}  # sequences that TRL puts through the model at once
OURS: dict[str, dict[str, Any]] = {"tiny": {}, "30M": {"tokens_per_microbatch": 256, "logprob_chunk": 128}}
BRANCHES: dict[str, Any] = {"length": 512, "shared": 0.75}  # of a group of GROUP, one for each prompt
OURS_BRANCHES: dict[str, dict[str, Any]] = {"tiny": {}, "30M": {"tokens_per_microbatch": 1536, "logprob_chunk": 128}}
# Where nothing is shared: as many sequences at once.
GROUP_AT_ONCE: dict[str, dict[str, Any]] = {"tiny": {}, "30M": {"tokens_per_microbatch": GROUP * 512}}
TRICKS: dict[str, dict[str, Any]] = {
    "as it comes": {},
    "padded, prompts not shared": {"padded": True, "share_prompts": False},
    "packed, prompts not shared": {"share_prompts": False},
    "all logits held at once": {"whole_logits": True},
    "micro-batches of 256 tokens": {"tokens_per_microbatch": 256},
    "the same, gradient checkpointing": {"tokens_per_microbatch": 256, "gradient_checkpointing": True},
    "two optimiser steps": {"minibatches": 2},
    "the same, with an old-policy pass": {"minibatches": 2, "old_logprobs": "recompute"},
}
FLAT_LENGTHS, FLAT_TOKENS = (256, 1024, 4096, 8192), 8192
FLAT_ROUNDS = {"tiny": 3, "30M": 1}
SPEED, MEMORY, PADDING, FLAT = 2.0, 0.6, 0.05, 0.15  # the bounds
APART = "Atropos, nothing shared"

Measured = dict[str, Any]


class Work:
    """Models and batches in a scratch directory."""

    def __init__(self, folder: Path, data: Path | None) -> None:
        from atropos_env_gsm8k.plugin import HERE

        self.folder = folder
        self.models = {"tiny": HERE / "tiny", "30M": trainer_work.make_model(folder / "30M", HERE / "tiny")}
        self.vocabulary = {"tiny": 598, "30M": trainer_work.SHAPE["vocab_size"]}
        self.batches: dict[str, Batch] = {}
        for name, prompts in PROMPTS.items():
            first, replies = trainer_work.lengths(prompts, GROUP, 0, data)
            self.add(name, trainer_work.batch(first, replies, self.vocabulary[name]))
            self.add(f"{name}-short", trainer_work.batch(first, np.minimum(replies, 8), self.vocabulary[name]))
            branched = trainer_work.branches(prompts, GROUP, vocabulary=self.vocabulary[name], **BRANCHES)
            self.add(f"{name}-branches", branched)
        self.add("30M-padded", trainer_work.padded(self.batches["30M"]))
        for length in FLAT_LENGTHS:
            lengths = np.ones(1, np.int64), np.full(FLAT_TOKENS // length, length - 1)
            self.add(f"flat-{length}", trainer_work.batch(*lengths, self.vocabulary["tiny"]))

    def add(self, name: str, batch: Batch) -> None:
        self.batches[name] = batch
        columns = [field.name for field in fields(batch) if field.name not in ("version", "columns", "ragged")]
        np.savez(self.folder / f"{name}.npz", **{column: getattr(batch, column) for column in columns})

    def ours(self, model: str, batch: str, *, steps: int = 1, attention: bool = False, **options: Any) -> Measured:
        whole_logits = options.pop("whole_logits", False)
        return self._measured(
            [sys.executable, "-m", "benchmarks.trainer_step"], model, batch, steps,
            options=options, whole_logits=whole_logits, attention=attention,
        )  # fmt: skip

    def theirs(self, model: str, batch: str, size: int) -> Measured:
        return self._measured(
            [TRL, "-m", "benchmarks.trainer_trl"], model, batch, STEPS[model],
            together=size, group=GROUP, gradient_checkpointing=False,
        )  # fmt: skip

    def _measured(self, command: list[str], model: str, batch: str, steps: int = 1, **more: Any) -> Measured:
        files = [str(self.folder / f"{name}.npz") for name in (f"{model}-short", *steps * [batch])]
        given = {"model": str(self.models[model]), "batches": files, "threads": THREADS, **more}
        ended = subprocess.run(
            [*command, json.dumps(given)], capture_output=True, text=True, timeout=DEADLINE_S,
            env={**os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "OMP_WAIT_POLICY": "PASSIVE",
                 "OMP_NUM_THREADS": str(THREADS)},
        )  # fmt: skip
        if ended.returncode != 0:
            raise SystemExit(f"{' '.join(command)} failed on {model}:\n{ended.stderr[-3000:]}")
        found: Measured = json.loads(ended.stdout.splitlines()[-1])
        return {
            "seconds": statistics.median(found["seconds"][1:]),
            "cpu_seconds": statistics.median(found["busy"][1:]),
            "growth": found["highest"] - found["loaded"],
            "attention": found.get("attention", 0.0),
            "load": round(os.getloadavg()[0], 1),
        }


def median(runs: list[Measured], name: str) -> float:
    return float(statistics.median(run[name] for run in runs))


def beside_trl(work: Work, rounds: int, *, branches: bool = False) -> dict[str, Any]:
    """By model. `branches`: of batches that branch, and beside our own update with nothing shared as well."""
    rows, found = [], {}
    for model in PROMPTS:
        runs: dict[str, list[Measured]] = {}
        batch, options = (f"{model}-branches", OURS_BRANCHES[model]) if branches else (model, OURS[model])
        for _ in range(rounds):  # alternating, so that a noisy minute hits all
            runs.setdefault("Atropos", []).append(work.ours(model, batch, steps=STEPS[model], **options))
            if branches:
                apart = {**options, **GROUP_AT_ONCE[model], "share_prompts": False}
                alone = work.ours(model, batch, steps=STEPS[model], **apart)
                runs.setdefault(APART, []).append(alone)
            for size in BATCHES[model]:
                runs.setdefault(f"TRL, batches of {size}", []).append(work.theirs(model, batch, size))
        tokens = len(work.batches[batch].tokens)
        best = min((name for name in runs if name.startswith("TRL")), key=lambda name: median(runs[name], "seconds"))
        ours = runs["Atropos"]
        found[model] = {
            "tokens": tokens, "runs": runs, "best": best,
            "speed": median(runs[best], "seconds") / median(ours, "seconds"),
            "speed_cpu": median(runs[best], "cpu_seconds") / median(ours, "cpu_seconds"),
            "memory": median(ours, "growth") / median(runs[best], "growth"),
        }  # fmt: skip
        if branches:
            found[model] |= {
                "speed_apart": median(runs[APART], "seconds") / median(ours, "seconds"),
                "memory_apart": median(ours, "growth") / median(runs[APART], "growth"),
            }
        rows += [
            (
                model,
                name + (" (its best)" if name == best else ""),
                f"{tokens / median(those, 'seconds'):,.0f}",
                f"{median(those, 'cpu_seconds'):.2f}",
                f"{median(those, 'growth') / 1e6:,.0f}",
                f"{max(run['load'] for run in those)}",
            )
            for name, those in runs.items()
        ]
    what = "update step, branches" if branches else "update step"
    console.table(("model", what, "tokens/s", "CPU s", "growth, MB", "load"), rows)
    return found


def tricks(work: Work, rounds: int) -> dict[str, Any]:
    runs: dict[str, list[Measured]] = {}
    for _ in range(rounds):
        for name, trick in TRICKS.items():
            options = dict(trick)
            batch = "30M-padded" if options.pop("padded", False) else "30M"
            runs.setdefault(name, []).append(work.ours("30M", batch, **options))
    base = runs["as it comes"]
    rows = [
        (
            name,
            f"{median(those, 'seconds'):.2f}",
            f"{median(those, 'cpu_seconds'):.2f}",
            f"{median(those, 'cpu_seconds') / median(base, 'cpu_seconds'):.2f}",
            f"{median(those, 'growth') / 1e6:,.0f}",
        )
        for name, those in runs.items()
    ]
    console.table(("30M, one batch", "s", "CPU s", "of the first row", "growth, MB"), rows)
    return runs


def flat(work: Work, model: str, rounds: int) -> list[dict[str, float]]:
    """CPU microseconds of a token by the length of its sequence, one sequence after another in one pass. Medians, for the
    rest is what is left of two large numbers."""
    runs: dict[int, list[Measured]] = {}
    for _ in range(rounds):
        for length in FLAT_LENGTHS:
            runs.setdefault(length, []).append(work.ours(model, f"flat-{length}", attention=True, share_prompts=False))
    rows = []
    for length, those in runs.items():
        whole, attention = (median(those, name) / FLAT_TOKENS * 1e6 for name in ("cpu_seconds", "attention"))
        rows.append({"length": length, "token": whole, "attention": attention, "rest": whole - attention})
    middle = statistics.median(row["rest"] for row in rows)
    for row in rows:
        row["of_median"] = row["rest"] / middle
    console.table(
        (f"{model}: tokens in a sequence", "CPU µs a token", "of which attention", "the rest", "of its median"),
        [
            (
                row["length"],
                f"{row['token']:.0f}",
                f"{row['attention']:.0f}",
                f"{row['rest']:.0f}",
                f"{row['of_median']:.2f}",
            )
            for row in rows
        ],
    )
    return rows


def padding(data: Path | None) -> dict[str, float]:
    """Rows of attention that are padding, over those that are not, on 512 sequences. Linear layers have none."""
    from atropos_trainer_grpo.config import GrpoOptions
    from atropos_trainer_grpo.packed_rows import microbatches, pack

    whole = trainer_work.batch(*trainer_work.lengths(64, GROUP, 1, data), vocabulary=598)
    found = {}
    for name, shares in (("prompts shared", True), ("prompts not shared", False)):
        padded, real = 0, 0.0
        together = (whole.tokens, whole.group) if shares else (None, None)
        limit = GrpoOptions().tokens_per_microbatch
        for run in microbatches(whole.lengths, np.arange(whole.sequences), limit, *together):
            part = whole.select(run)
            packing = pack(part.tokens, part.lengths, share=shares)
            rows = len(packing.queries) + len(packing.keys)
            padded, real = padded + rows, real + rows / (1 + packing.padding)
        found[name] = padded / real - 1
    dense = trainer_work.padded(whole)
    found["a padded trainer"] = len(dense.tokens) / len(whole.tokens) - 1
    console.table(("padding, of what is real", ""), [(name, f"{share:.1%}") for name, share in found.items()])
    return found


def bounds(result: Mapping[str, Any]) -> list[tuple[str, str, bool]]:
    """What is required, what was measured, and whether it holds."""
    beside, waste = (
        result["beside_trl"],
        max(result["padding"][name] for name in ("prompts shared", "prompts not shared")),
    )
    off = {model: max(abs(row["of_median"] - 1) for row in rows) for model, rows in result["flat"].items()}
    return [
        *((f"{model}: at least {SPEED} times TRL's tokens/s", f"{found['speed']:.2f}", found["speed"] >= SPEED)
          for model, found in beside.items()),
        (f"30M: at most {MEMORY} of TRL's growth of memory", f"{beside['30M']['memory']:.2f}", beside["30M"]["memory"] <= MEMORY),
        *((f"{model}, branches: at least {SPEED} times as fast as {other}", f"{found[name]:.2f}", found[name] >= SPEED)
          for model, found in result["branches"].items() for other, name in (("TRL", "speed"), ("with nothing shared", "speed_apart"))),
        *((f"30M, branches: at most {MEMORY} of the growth of {other}", f"{result['branches']['30M'][name]:.2f}",
           result["branches"]["30M"][name] <= MEMORY) for other, name in (("TRL", "memory"), ("nothing shared", "memory_apart"))),
        (f"padding below {PADDING:.0%}", f"{waste:.1%}", waste < PADDING),
        *((f"{model}: a token's cost without attention within {FLAT:.0%} of the median", f"{most:.0%}", most <= FLAT)
          for model, most in off.items()),
    ]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--gsm8k", type=Path, help="its train.jsonl, to count lengths anew")
    parser.add_argument("--out", type=Path, default=RESULTS / "trainer.json")
    wanted = parser.parse_args()
    if not Path(TRL).exists():
        raise SystemExit(f"TRL is not installed: make {Path(TRL).parts[0]}/stamp")
    result: dict[str, Any] = {"machine": described(), "threads": THREADS, "ours": OURS, "rounds": wanted.rounds}
    with tempfile.TemporaryDirectory(prefix="atropos-trainer-") as folder:
        work = Work(Path(folder), wanted.gsm8k)
        result["padding"] = padding(wanted.gsm8k)
        result["flat"] = {model: flat(work, model, rounds) for model, rounds in FLAT_ROUNDS.items()}
        result["beside_trl"] = beside_trl(work, wanted.rounds)
        result["branches"] = beside_trl(work, wanted.rounds, branches=True)
        result["tricks"] = tricks(work, wanted.rounds)
    found = bounds(result)
    result["bounds"] = [{"bound": name, "found": value, "holds": holds} for name, value, holds in found]
    result["load_at_end"] = round(os.getloadavg()[0], 1)
    console.table(
        ("bound", "found", ""), [(name, value, "holds" if holds else "DOES NOT HOLD") for name, value, holds in found]
    )
    wanted.out.parent.mkdir(exist_ok=True)
    wanted.out.write_text(json.dumps(result, indent=1) + "\n")
    sys.exit(0 if all(holds for *_, holds in found) else 1)


if __name__ == "__main__":
    main()

"""How many CPU threads are of use to a model: python -m benchmarks.threads

Runs of real engines and trainers on models of three sizes, with one thread and with every core, one after the other: the tiny policy,
and two of its architecture with random weights. The median of a step's seconds of sampling and of training, without the first step.
Writes benchmarks/results/threads.json; `cpu_threads` in atropos_core/models/model_size.py follows it.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from pathlib import Path
from statistics import median

from transformers import AutoConfig, AutoModelForCausalLM

import atropos_env_gsm8k
from atropos_core import console
from atropos_core.models.model_size import read
from benchmarks.machine import RESULTS, described
from tests.conftest import metrics_of
from tests.e2e.runs import finish

TINY = Path(atropos_env_gsm8k.__file__).parent / "tiny"
SIZES = {"tiny": (), "hidden 256": (256, 6), "hidden 512": (512, 8)}  # width, layers
STEPS = 4
ENVIRONMENT = """
from hashlib import sha256
from atropos_core.interfaces import Environment
from atropos_core.types import Score, Task


class Digests(Environment):
    \"\"\"Rewards that differ, whatever is said.\"\"\"

    def tasks(self, split):
        numbers = range(64) if split == "train" else range(64, 80)
        texts = [f"Anna has {n} apples and buys {n + 3} more. How many now?" for n in numbers]
        return [Task(f"{split}-{text}", ({"role": "user", "content": text},)) for text in texts]

    async def score(self, task, reply):
        return Score(sha256(reply["content"].encode()).digest()[0] / 255)
"""


def larger(folder: Path, width: int, layers: int) -> Path:
    config = AutoConfig.from_pretrained(TINY)
    config.hidden_size, config.intermediate_size, config.num_hidden_layers = width, 3 * width, layers
    config.num_attention_heads, config.num_key_value_heads, config.head_dim = width // 64, width // 128, 64
    config.layer_types = ["full_attention"] * layers
    shutil.copytree(TINY, folder, ignore=shutil.ignore_patterns("*.safetensors", "config.json"))
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def measured(folder: Path, model: str, threads: int) -> dict[str, float]:
    environment, settings = f"{folder.parent}/digests.py:Digests", [
        f"engine.threads={threads}", f"trainer.threads={threads}", "evaluation.problems=0", "checkpoint.every=0",
        "sampling.max_tokens=48",
    ]  # fmt: skip
    sets = [part for one in settings for part in ("--set", one)]
    run = ["run", "--env", environment, "--model", model, "--dir", str(folder), "--steps", str(STEPS), "--seed", "1"]
    finish(folder.parent, *run, *sets, deadline_s=1200)
    lines = metrics_of(folder)[2:]
    return {name: median(line[f"time/{name}_s"] for line in lines) for name in ("waiting", "trainer/step")}


def main() -> None:
    rows, cores = [], len(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory() as temporary:
        (Path(temporary) / "digests.py").write_text(ENVIRONMENT)
        for name, shape in SIZES.items():
            model = str(larger(Path(temporary) / name.replace(" ", "-"), *shape)) if shape else "tiny"
            size = read(Path(model) if shape else TINY)
            assert size is not None
            one, all_cores = (measured(Path(temporary) / f"{name}-{n}", model, n) for n in (1, cores))
            rows.append({"model": name, "parameters": size.parameters, "one_thread": one, "every_core": all_cores})
    (RESULTS / "threads.json").write_text(json.dumps({**described(), "rows": rows}, indent=1) + "\n")
    table = [
        [row["model"], f"{row['parameters']:,}"]
        + [f"{row[kind][part]:.2f} s" for part in ("waiting", "trainer/step") for kind in ("one_thread", "every_core")]
        for row in rows
    ]
    heads = ["model", "parameters", "sampling, 1", f"sampling, {cores}", "training, 1", f"training, {cores}"]
    console.table(heads, table)


if __name__ == "__main__":
    main()

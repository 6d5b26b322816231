"""Measures, for each family of causal language models, which ways to train and to sample are exact: python -m benchmarks.models

On a small copy of each architecture (float32, CPU): the trainer's layouts and the engine's decoders against transformers' plain forward
pass of single sequences. The same probes decide in a run. Writes benchmarks/results/models.json; tools/make_models_page.py makes
docs/models.md of it.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers

from atropos_core import console
from atropos_engine_hf import probe as engine
from atropos_trainer_grpo import layout_probe as trainer
from atropos_trainer_grpo.architecture import architecture_of
from benchmarks.machine import RESULTS, described
from tests.models.families import FAMILIES, config_of


def measured(name: str) -> dict[str, Any]:
    config = config_of(name)
    asks = architecture_of(config)
    with tempfile.TemporaryDirectory(prefix="atropos-bench-") as folder:
        config.save_pretrained(folder)
        found = {"trainer": trainer.measured(Path(folder)), "engine": engine.measure(config)}
    form = None if asks.logits is None else {"scale": asks.logits.scale, "cap": asks.logits.cap}
    return {**found, "attention": sorted(asks.attention), "logits": form}


if __name__ == "__main__":
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    families = {}
    for name in FAMILIES:
        families[name] = measured(name)
        ways = families[name]["trainer"] | families[name]["engine"]["off"]
        console.say(f"{name}: " + ", ".join(f"{way} {off:.0e}" for way, off in ways.items() if isinstance(off, float)))
    path = RESULTS / "models.json"
    before = json.loads(path.read_text())  # with what benchmarks/models_vllm.py has measured
    found = before | {"machine": described(), "transformers": transformers.__version__, "families": families}
    path.write_text(json.dumps(found, indent=1) + "\n")

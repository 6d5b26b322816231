"""Measures the cost of the paths that are exact for every model: rows next to packed in the trainer, cohort next to slots in the engine.

    python -m benchmarks.layouts [--rounds 3] [--threads 2] [--out FILE]

Random models of about 30 M parameters in float32, batches with the lengths of GSM8K, eight replies to each prompt. Each measurement has a
separate process, and they alternate. Memory is what is resident at most beyond the opened model. A path that is not exact for a
model is not measured. Writes benchmarks/results/layouts.json.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.machine import RESULTS, described

WIDTHS: dict[str, Any] = {
    "vocab_size": 32_000, "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 6, "num_attention_heads": 8,
    "num_key_value_heads": 4, "head_dim": 64, "tie_word_embeddings": True, "max_position_embeddings": 2048,
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "qwen3": {},
    "gemma3_text": {"sliding_window": 64, "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2},
    "lfm2": {"layer_types": ["conv", "conv", "full_attention"] * 2},
}  # fmt: skip
PATHS = {"trainer": ("packed", "rows"), "engine": ("slots", "cohort")}
PROMPTS, GROUP = 8, 8
DEADLINE_S = 600


def trained(model: Path, layout: str, threads: int) -> dict[str, float]:
    """Update steps on the same batch, after one on short replies."""
    import numpy as np

    from atropos_core.plugins.provider import RunContext
    from atropos_trainer_grpo.config import GrpoOptions
    from atropos_trainer_grpo.trainer import GrpoTrainer
    from benchmarks import resident, trainer_work
    from benchmarks.trainer_step import writing

    questions, answers = trainer_work.lengths(PROMPTS, GROUP, 0)
    short = trainer_work.batch(questions, np.minimum(answers, 8), WIDTHS["vocab_size"])
    batch = trainer_work.batch(questions, answers, WIDTHS["vocab_size"])
    options: Any = {"layout": layout, "tokens_per_microbatch": 4096, "logprob_chunk": 512}

    async def run() -> dict[str, float]:
        context = RunContext(model, model, transport="checkpoint", threads=threads)
        trainer = GrpoTrainer(GrpoOptions(**options), context)
        await trainer.open()
        for parameter in trainer.model.parameters():
            parameter.data.add_(0)  # a mapped file is resident once it is touched
        loaded, seconds = resident.settle(), []
        for one in (short, batch, batch):
            began = time.perf_counter()
            await trainer.step(one, writing)
            seconds.append(time.perf_counter() - began)
        highest = resident.highest()
        await trainer.close()
        return {"tokens_per_s": len(batch.tokens) / min(seconds[1:]), "memory_mb": (highest - loaded) / 1e6}

    return asyncio.run(run())


def sampled(model: Path, path: str, threads: int) -> dict[str, float]:
    """Replies to the same prompts, each as long as in the trainer's batch, so that rows end at different times."""
    import numpy as np

    from atropos_core.plugins.provider import RunContext
    from atropos_core.types import Sampling
    from atropos_engine_hf.config import HFOptions
    from atropos_engine_hf.engine import HFEngine
    from benchmarks import resident, trainer_work

    questions, answers = trainer_work.lengths(PROMPTS, GROUP, 0)
    random = np.random.default_rng(0)
    prompts = [random.integers(3, WIDTHS["vocab_size"], length).astype(np.int32) for length in questions]
    options: Any = {"decode": path}

    async def run() -> dict[str, float]:
        engine = HFEngine(HFOptions(**options), RunContext(model, model, threads=threads))
        await engine.open()

        async def reply(prompt: Any, length: int, seed: int) -> int:
            (one,) = await engine.sample(prompt, 1, Sampling(max_tokens=length), [seed], DEADLINE_S)
            return len(one.tokens)

        loaded, seconds, tokens = resident.settle(), [], 0
        for most in (8, 10_000, 10_000):
            began = time.perf_counter()
            made = await asyncio.gather(
                *(reply(prompts[at // GROUP], min(int(length), most), at) for at, length in enumerate(answers))
            )
            seconds.append(time.perf_counter() - began)
            tokens = sum(made)
        highest = resident.highest()
        await engine.close()
        return {"tokens_per_s": tokens / min(seconds[1:]), "memory_mb": (highest - loaded) / 1e6}

    return asyncio.run(run())


def make_model(directory: Path, family: str) -> Path:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **WIDTHS | MODELS[family])
    model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.config.eos_token_id = model.generation_config.eos_token_id = None
    model.save_pretrained(directory)
    (directory / "tokenizer.json").write_text(
        '{"version": "1.0", "model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}}'
    )
    return directory


def exact(model: Path) -> set[str]:
    """The paths that are exact for this model, by the probes of trainer and engine."""
    from transformers import AutoConfig

    from atropos_engine_hf.decode_path import LIMIT as DECODE_LIMIT
    from atropos_engine_hf.probe import measure
    from atropos_trainer_grpo.layout_probe import measured
    from atropos_trainer_grpo.layouts import LIMIT, WAYS, way

    layouts, decoders = measured(model), measure(AutoConfig.from_pretrained(model))["off"]
    found = {name for name, own in WAYS if isinstance(off := layouts[way(name, own)], float) and off <= LIMIT}
    return found | {name for name, off in decoders.items() if off <= DECODE_LIMIT}


def one(kind: str, path: str, model: Path, threads: int) -> dict[str, float]:
    """Measure in a separate process."""
    command = [sys.executable, "-m", "benchmarks.layouts", "--one", kind, path, str(model), "--threads", str(threads)]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_WAIT_POLICY": "PASSIVE", "OMP_NUM_THREADS": str(threads)}
    ended = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, env=environment)
    if ended.returncode != 0:
        raise SystemExit(f"{' '.join(command)} failed:\n{ended.stderr[-3000:]}")
    found: dict[str, float] = json.loads(ended.stdout.splitlines()[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, default=RESULTS / "layouts.json")
    parser.add_argument("--one", nargs=3, metavar=("KIND", "PATH", "MODEL"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        kind, path, model = options.one
        print(json.dumps((trained if kind == "trainer" else sampled)(Path(model), path, options.threads)))
        return
    machine, found = described(), {}
    with tempfile.TemporaryDirectory() as folder:
        for family in MODELS:
            model = make_model(Path(folder) / family, family)
            possible = exact(model)
            runs: dict[str, list[dict[str, float]]] = {}
            for _ in range(options.rounds):
                for kind, paths in PATHS.items():
                    for path in paths:
                        if path in possible:
                            runs.setdefault(path, []).append(one(kind, path, model, options.threads))
            found[family] = {
                path: {name: round(statistics.median(run[name] for run in many), 1) for name in many[0]}
                for path, many in runs.items()
            }
            print(family, json.dumps(found[family]), flush=True)
    figures = {"machine": machine, "threads": options.threads, "rounds": options.rounds, "models": found}
    options.out.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()

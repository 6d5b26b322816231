"""Tokens per second of the engine "hf", in process and hosted in a child, beside transformers' own `generate`.

    python -m benchmarks.engine [--model DIRECTORY] [--rows 256] [--new 25] [--threads 1] [--repeat 5]

Same model, prompts, number of new tokens and threads; nothing stops early, so that all sample equally many tokens.
Repetitions alternate, and the median counts. Writes benchmarks/results/engine.json.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from benchmarks.machine import RESULTS, described

TINY = Path(__file__).parents[1] / "plugins" / "env_gsm8k" / "atropos_env_gsm8k" / "tiny"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=TINY)
    parser.add_argument("--rows", type=int, nargs="+", default=[128, 256, 512])
    parser.add_argument("--group", type=int, default=8, help="continuations of one prompt")
    parser.add_argument("--prompt", type=int, default=35, help="tokens of a prompt, give or take a quarter")
    parser.add_argument("--new", type=int, default=25)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeat", type=int, default=5)
    return parser.parse_args()


def model_without_stops(source: Path, out: Path) -> str:
    """A copy of the model that never stops, or a random one of the tiny policy's shape."""
    from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

    if (source / "config.json").is_file():
        model, name = AutoModelForCausalLM.from_pretrained(source), str(source)
    else:
        model, name = Qwen3ForCausalLM(Qwen3Config(
            vocab_size=640, hidden_size=128, intermediate_size=320, num_hidden_layers=4, num_attention_heads=4,
            num_key_value_heads=2, head_dim=32, max_position_embeddings=1024, tie_word_embeddings=True,
        )), "a random model of the tiny policy's shape"  # fmt: skip
    model.config.eos_token_id = model.generation_config.eos_token_id = None
    model.save_pretrained(out)
    (out / "tokenizer.json").write_text(
        '{"version": "1.0", "model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}}'
    )
    return name


async def seconds(call: Callable[[], Awaitable[Any]]) -> float:
    start = time.perf_counter()
    await call()
    return time.perf_counter() - start


async def measure(options: argparse.Namespace, rows: int, engine: Any, hosted: Any) -> dict[str, float]:
    import numpy as np
    import torch

    from atropos_core.types import Sampling

    random = np.random.default_rng(0)
    lengths = random.integers(options.prompt * 3 // 4, options.prompt * 5 // 4 + 1, rows // options.group)
    vocabulary = engine.model.config.vocab_size
    prompts = [random.integers(3, vocabulary, length).astype(np.int32) for length in lengths]
    sampling = Sampling(max_tokens=options.new)
    repeated = [prompt for prompt in prompts for _ in range(options.group)]
    ids = torch.zeros(len(repeated), int(lengths.max()), dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(repeated):
        ids[row, -len(prompt) :], mask[row, -len(prompt) :] = torch.from_numpy(prompt.astype(np.int64)), 1

    async def generate() -> None:
        made = engine.model.generate(
            ids, attention_mask=mask, max_new_tokens=options.new, do_sample=True, top_k=0, pad_token_id=0
        )
        assert made.shape[1] == ids.shape[1] + options.new

    async def sample(of: Any) -> None:
        made = await asyncio.gather(
            *(of.sample(prompt, options.group, sampling, range(options.group), 600) for prompt in prompts)
        )
        assert sum(len(completion.tokens) for call in made for completion in call) == len(repeated) * options.new

    ways = {"generate": generate, "in process": lambda: sample(engine), "hosted": lambda: sample(hosted)}
    taken: dict[str, list[float]] = {name: [] for name in ways}
    for repetition in range(options.repeat + 1):
        for name, way in ways.items():
            took = await seconds(way)
            if repetition:  # the first warms up
                taken[name].append(took)
    return {name: len(repeated) * options.new / statistics.median(times) for name, times in taken.items()}


async def main() -> None:
    options = arguments()
    machine = described()
    os.environ["OMP_WAIT_POLICY"] = "PASSIVE"  # as hosting sets it for every child; read when torch loads
    os.environ["OMP_NUM_THREADS"] = str(options.threads)
    import torch

    from atropos_core.plugins.provider import RunContext
    from atropos_core.processes.child import Child
    from atropos_core.processes.proxies import HostedEngine
    from atropos_engine_hf.config import HFOptions
    from atropos_engine_hf.engine import HFEngine

    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder)
        name = model_without_stops(options.model, directory)
        engine = HFEngine(HFOptions(max_batch=512), RunContext(directory, directory, threads=options.threads))
        info = await engine.open()
        context = {"directory": directory, "model": directory, "threads": options.threads}
        build = {"kind": "engine", "name": "hf", "options": {"max_batch": 512}, "context": context}
        hosted = HostedEngine(await Child.start("engine", build, directory / "engine.log", threads=options.threads))
        await hosted.open()
        print(
            f"{name}: {info.parameters:,} parameters, {info.dtype}, {options.threads} threads, torch {torch.__version__};"
        )
        shape = f"{options.group} continuations of {options.new} tokens each"
        print(f"prompts of about {options.prompt} tokens, {shape}; load {os.getloadavg()[0]:.1f}\n")
        print("rows   generate  in process (ratio)     hosted (ratio)   [tokens/s]")
        measured: dict[int, dict[str, float]] = {}
        try:
            for rows in options.rows:
                speed = measured[rows] = await measure(options, rows, engine, hosted)
                plain = speed["generate"]
                print(
                    f"{rows:4d} {plain:10,.0f} {speed['in process']:11,.0f} ({speed['in process'] / plain:4.2f})"
                    f" {speed['hosted']:10,.0f} ({speed['hosted'] / plain:4.2f})"
                )
        finally:
            await hosted.close()
            await engine.close()
    RESULTS.mkdir(exist_ok=True)
    figures = {"machine": machine, "model": options.model.name, "threads": options.threads, "tokens_per_s": measured}
    (RESULTS / "engine.json").write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    asyncio.run(main())
